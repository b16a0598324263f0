/* Rows of many tensors, copied one after another. Copies bytes, of any type. Compiled and called as segments.c is. */

#include "team.h"

#define NO_WAKE (128 << 10) /* below so many bytes no thread is woken */
#define PIECE (32 << 10)    /* bytes that one thread copies at a time */
#define LOOKAHEAD 8         /* rows that are prefetched before their turn */

typedef struct {
    const char *const *pieces;
    const int64_t *strides, *which, *rows;
    int64_t count, bytes;
    char *out;
} picks;

INLINE const char *source(const picks *job, int64_t i) {
    const int64_t piece = job->which[i];
    return job->pieces[piece] + job->rows[i] * job->strides[piece];
}

static void pick_rows(const void *what, int64_t from, int64_t to, int worker) {
    const picks *job = what;
    (void)worker;
    for (int64_t i = from; i < to; i++) {
        if (i + LOOKAHEAD < job->count) __builtin_prefetch(source(job, i + LOOKAHEAD), 0, 2);
        memcpy(job->out + i * job->bytes, source(job, i), job->bytes);
    }
}

void afterglow_pick(const void *pieces, const int64_t *strides, const int64_t *which, const int64_t *rows, int64_t count, int64_t bytes,
                    void *out, int threads) {
    const picks job = {.pieces = pieces, .strides = strides, .which = which, .rows = rows, .count = count, .bytes = bytes, .out = out};
    const int64_t step = bytes ? 1 + PIECE / bytes : count;
    team_share(pick_rows, &job, count, step, threads, count * bytes >= NO_WAKE);
}
