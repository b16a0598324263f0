/* What all of these files need: what they are written for, names for each width of vectors, and threads that share work. */

#if !defined(__x86_64__) || !defined(__linux__) || !defined(__GNUC__) || defined(__clang__)
#error "written for GCC on x86-64 and Linux; elsewhere the package does without"
#endif

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define JOIN(a, b) JOIN_(a, b)
#define JOIN_(a, b) a##_##b
#define NAME(x) JOIN(x, V)

/* Pieces [from, to) of some work; `desk` is a number below `threads` that no other thread has meanwhile. */
typedef void work(const void *what, int64_t from, int64_t to, int desk);

/* Does pieces [0, count), `step` at a time, with up to `threads` threads. Those that sleep are woken only where that is `worth`
   it; those that are still awake from the call before help anyway. */
__attribute__((visibility("hidden"))) void team_share(work *call, const void *what, int64_t count, int64_t step, int threads,
                                                      int worth);
