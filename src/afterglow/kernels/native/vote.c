/* What heads find important, and a ranking of that: the k largest of each head, found by their bits, 11 at a time, and all that
   one of them has, by votes. Float32. Torch takes two dozen operations, most of which take longer to be called than to run. Built
   and called as segments.c is. */

#include "team.h"

#define ALONE 32768 /* numbers that nobody is woken for */
#define DIGIT 11
#define DIGITS 3 /* 11 + 11 + 10 bits */
#define KEY 44   /* bits: 12 of votes, 32 of a mean */

typedef struct {
    const float *x;
    int64_t stride, n, k;
    uint8_t *mask;
    int64_t *places;
} rows;

/* Of two numbers the larger one's is larger; both zeros have the same, and no NaN is expected. */
INLINE uint32_t order(float x) {
    uint32_t b;
    x += 0.0f;
    memcpy(&b, &x, sizeof b);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

/* What the k-th largest is ordered by, and in `equals` how many of its equals are among the k. */
static uint32_t kth(const float *x, int64_t n, int64_t k, int64_t *equals) {
    uint32_t found = 0;
    int left = 32;
    for (int digit = 0; digit < DIGITS; digit++) {
        const int shift = left > DIGIT ? left - DIGIT : 0, size = left - shift;
        int64_t counts[1 << DIGIT] = {0};
        for (int64_t i = 0; i < n; i++) {
            const uint32_t b = order(x[i]);
            if (left == 32 || b >> left == found >> left) counts[b >> shift & ((1u << size) - 1)]++;
        }
        uint32_t at = (1u << size) - 1;
        for (; counts[at] < k; at--) k -= counts[at];
        found |= at << shift;
        left = shift;
    }
    *equals = k;
    return found;
}

static void choose(const void *what, int64_t from, int64_t to, int desk) {
    const rows *p = what;
    (void)desk;
    for (int64_t row = from; row < to; row++) {
        const float *x = p->x + row * p->stride;
        uint8_t *mask = p->mask + row * p->n;
        int64_t equals, found = 0, *places = p->places + row * p->k;
        const uint32_t least = kth(x, p->n, p->k, &equals);
        for (int64_t i = 0; i < p->n; i++) {
            const uint32_t b = order(x[i]);
            const int equal = b == least && equals > 0;
            equals -= equal;
            mask[i] = b > least || equal;
            if (found == p->k) continue;
            places[found] = i;
            found += mask[i];
        }
    }
}

typedef struct {
    uint64_t key;
    int64_t row;
} ranked;

/* Those with the largest keys (of KEY bits) first; of equals in the order that they come in. The result is in `x` or in `other`. */
static ranked *sorted(ranked *x, ranked *other, int64_t n) {
    for (int shift = 0; shift < KEY; shift += DIGIT) {
        int64_t ends[(1 << DIGIT) + 1] = {0};
        for (int64_t i = 0; i < n; i++) ends[(x[i].key >> shift & ((1 << DIGIT) - 1))]++;
        if (n == 0 || ends[x[0].key >> shift & ((1 << DIGIT) - 1)] == n) continue;
        for (int at = (1 << DIGIT) - 1; at >= 0; at--) ends[at] += ends[at + 1];
        for (int64_t i = n; i-- > 0;) other[--ends[x[i].key >> shift & ((1 << DIGIT) - 1)]] = x[i];
        ranked *swap = x;
        x = other;
        other = swap;
    }
    return x;
}

/* Of each of `count` (at most 4095) rows of x, `stride` floats apart, the k (1 to n) largest of n; of equals the first ones: as a
   mask [count][n], and their places [count][k], ascending. `ranking` [n]: all that are among them, by how often, then by the larger
   `mean` [n], then the lower one first. Returns how many that are; -1: no memory. */
int64_t afterglow_vote_3(const float *x, int64_t stride, int64_t count, int64_t n, int64_t k, const float *mean, uint8_t *mask,
                         int64_t *places, int64_t *ranking, int threads) {
    const rows p = {.x = x, .stride = stride, .n = n, .k = k, .mask = mask, .places = places};
    team_share(choose, &p, count, 1, threads, count * n >= ALONE);
    ranked *all = malloc(2 * n * sizeof *all);
    if (!all) return -1;
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t votes = 0;
        for (int64_t row = 0; row < count; row++) votes += mask[row * n + i];
        all[found].key = votes << 32 | order(mean[i]);
        all[found].row = i;
        found += votes > 0;
    }
    const ranked *by_votes = sorted(all, all + n, found);
    for (int64_t i = 0; i < found; i++) ranking[i] = by_votes[i].row;
    free(all);
    return found;
}
