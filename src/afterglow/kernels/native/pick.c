/* Rows out of many places, one after the other. Bytes: what they mean does not matter. Built and called as segments.c is. */

#include "team.h"

#define ALONE (128 << 10) /* bytes that nobody is woken for */
#define PIECE (32 << 10)  /* bytes that one thread copies at a time */
#define SOON 8            /* rows that are asked for before it is their turn */

typedef struct {
    const char *const *pieces;
    const int64_t *strides, *which, *rows;
    int64_t count, bytes;
    char *out;
} picks;

INLINE const char *place(const picks *p, int64_t i) {
    const int64_t piece = p->which[i];
    return p->pieces[piece] + p->rows[i] * p->strides[piece];
}

static void pick(const void *what, int64_t from, int64_t to, int desk) {
    const picks *p = what;
    (void)desk;
    for (int64_t i = from; i < to; i++) {
        if (i + SOON < p->count) __builtin_prefetch(place(p, i + SOON), 0, 2);
        memcpy(p->out + i * p->bytes, place(p, i), p->bytes);
    }
}

/* out [count][bytes] = of piece which[i], whose rows are strides[which[i]] bytes apart, row rows[i]. */
void afterglow_pick_3(const void *pieces, const int64_t *strides, const int64_t *which, const int64_t *rows, int64_t count,
                      int64_t bytes, void *out, int threads) {
    const picks p = {.pieces = pieces, .strides = strides, .which = which, .rows = rows, .count = count, .bytes = bytes, .out = out};
    const int64_t step = bytes ? 1 + PIECE / bytes : count;
    team_share(pick, &p, count, step, threads, count * bytes >= ALONE);
}
