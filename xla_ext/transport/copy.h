// Copying between private memory and a ring that another core reads or writes.
#pragma once

#include <cstddef>

namespace ringjax {

// Copies like memcpy, but with vector stores. The C library copies a few KiB and more
// with a string instruction, which on some processors (AMD Zen) is several times slower
// than vector stores if the lines are in another core's cache. A ring's lines always
// are.
void CopyBytes(void* to, const void* from, size_t bytes);

// Copies like memcpy, but with non-temporal stores, which do not fetch the line that
// they write. Use it for results that are larger than the caches and not read soon, and
// for lines in the cache of a distant core (AdaptiveCopier).
void CopyNonTemporal(void* to, const void* from, size_t bytes);

}  // namespace ringjax
