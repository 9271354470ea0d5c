// Copying between private memory and a ring that another core reads or writes.
#pragma once

#include <cstddef>

namespace ringjax {

// Copies like memcpy, but with vector loads and stores. From a few KiB on, the C
// library copies with a string instruction, which on some processors (AMD Zen) is
// several times slower if the lines that it reads are in another core's cache, as the
// lines of a ring are when the reader copies them out.
void CopyBytes(void* to, const void* from, size_t bytes);

// Copies like memcpy, but with non-temporal stores, which do not fetch the line that
// they write. Use it for results that are larger than the caches and not read soon, and
// for lines in the cache of a distant core (AdaptiveCopier).
void CopyNonTemporal(void* to, const void* from, size_t bytes);

}  // namespace ringjax
