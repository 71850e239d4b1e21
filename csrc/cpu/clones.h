// Compiles a function for several instruction sets, one of which is chosen when the library is loaded, if
// compiler and loader can do that; else compiles it once.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__)
#define PATCHCONV_CLONES_FOR(...) __attribute__((target_clones("default", __VA_ARGS__)))
#else
#define PATCHCONV_CLONES_FOR(...)
#endif
