// Copying between private memory and a ring that another core reads or writes.
#pragma once

#include <cstddef>

namespace ringjax {

// As memcpy. The C library moves a few KiB and more with a string instruction, which on
// some processors (AMD Zen) is several times slower than ordinary vector stores when
// the lines are in another core's cache, as a ring's lines always are.
void CopyBytes(void* to, const void* from, size_t bytes);

// As memcpy, past the caches: what is written is not read before it is written. For
// results larger than the caches, which nobody needs soon: an ordinary store would read
// every line first.
void CopyPast(void* to, const void* from, size_t bytes);

}  // namespace ringjax
