/* What all of these files need: what they are written for, names for each width of vectors, and threads that share work. */

#pragma once

#if !defined(__x86_64__) || !defined(__linux__) || !defined(__GNUC__)
#error "written for GCC or clang on x86-64 and Linux; elsewhere the package does without"
#endif

#include "afterglow.h"

#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define JOIN(a, b) JOIN_(a, b)
#define JOIN_(a, b) a##_##b
#define NAME(x) JOIN(x, V)
#define PRAGMA(...) _Pragma(#__VA_ARGS__)

/* Functions between TARGET(features) and END_TARGET are compiled for processors that have these features. */
#ifdef __clang__
#define TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#define UNROLL(count) PRAGMA(clang loop unroll_count(count))
#else
#define TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#define UNROLL(count) PRAGMA(GCC unroll count)
#endif

/* There is no processor that has AVX2 and does not convert 16-bit floats. */
#define AVX512 "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c"
#define AVX2 "avx2,fma,f16c"

/* Does pieces [from, to) of a job; `worker` is a number below `threads` that no other thread has meanwhile. */
typedef void piece_work(const void *what, int64_t from, int64_t to, int worker);

/* Does pieces [0, count), `step` at a time, with up to `threads` threads. `wake`: threads that sleep are woken as well; threads that
   are still awake from the call before help anyway. */
__attribute__((visibility("hidden"))) void team_share(piece_work *call, const void *what, int64_t count, int64_t step, int threads,
                                                      int wake);
