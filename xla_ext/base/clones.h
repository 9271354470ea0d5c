// RINGJAX_CLONES: compiles a function for several generations of x86-64; the dynamic
// linker picks one when it loads us. Elsewhere it means nothing.
#pragma once

#if defined(RINGJAX_SANITIZED) || defined(__SANITIZE_THREAD__) || \
    defined(__SANITIZE_ADDRESS__)
#define RINGJAX_CLONES  // resolvers would run before the sanitizer's start-up
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    defined(__linux__)
#define RINGJAX_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RINGJAX_CLONES
#endif
