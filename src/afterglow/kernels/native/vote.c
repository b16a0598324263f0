/* The rows that heads find important, and a ranking: the k largest of each head, found by their bits, 11 at a time, and all rows
   with a vote, by votes. Float32. Torch takes two dozen operations; most take longer to be called than to run. Built
   and called as segments.c is. */

#include "team.h"

#define NO_WAKE 32768 /* below so many numbers no thread is woken */
#define DIGIT 11
#define DIGITS 3 /* 11 + 11 + 10 bits */
#define KEY 44   /* bits: 12 of votes, 32 of a mean */

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

static void choose_rows(const void *what, int64_t from, int64_t to, int worker) {
    const afterglow_ballot *ballot = what;
    const int64_t rows = ballot->rows, k = ballot->k;
    (void)worker;
    for (int64_t head = from; head < to; head++) {
        const float *sums = ballot->sums + head * ballot->stride;
        uint8_t *mask = ballot->mask + head * rows;
        int64_t equals, found = 0, *places = ballot->places + head * k;
        const uint32_t least = kth(sums, rows, k, &equals);
        for (int64_t i = 0; i < rows; i++) {
            const uint32_t b = order(sums[i]);
            const int equal = b == least && equals > 0;
            equals -= equal;
            mask[i] = b > least || equal;
            if (found == k) continue;
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

int64_t afterglow_vote(const afterglow_ballot *ballot, int threads) {
    const int64_t rows = ballot->rows;
    team_share(choose_rows, ballot, ballot->heads, 1, threads, ballot->heads * rows >= NO_WAKE);
    ranked *all = malloc(2 * rows * sizeof *all);
    if (!all) return -1;
    int64_t found = 0;
    for (int64_t row = 0; row < rows; row++) {
        uint64_t votes = 0;
        for (int64_t head = 0; head < ballot->heads; head++) votes += ballot->mask[head * rows + row];
        all[found].key = votes << 32 | order(ballot->mean[row]);
        all[found].row = row;
        found += votes > 0;
    }
    const ranked *by_votes = sorted(all, all + rows, found);
    for (int64_t i = 0; i < found; i++) ballot->ranking[i] = by_votes[i].row;
    free(all);
    return found;
}
