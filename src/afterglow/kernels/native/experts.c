/* A mixture of experts: scores, choice, and the MLPs that were chosen, each with all its rows, in the order of their numbers.

   A row's result does not depend on its batch: neither do its scores and products, and they are added up in the order of the experts.
   Compiled and called as segments.c is. */

#include "block.h"

#include <math.h>

/* A row that an expert was chosen for. */
typedef struct {
    int64_t row;
    float weight;
} choice;

/* Memory for CHUNK rows of an expert. */
typedef struct {
    float *x, *inner, *gated, *part;
} scratch;

/* Writes the `chosen` highest of `count` scores, no two the same, and their weights; `taken` [count]. Of equals the first. */
static void choose(const afterglow_experts *e, const float *scores, uint8_t *taken, int64_t *which, float *weights) {
    memset(taken, 0, e->count);
    for (int64_t i = 0; i < e->chosen; i++) {
        int64_t best = -1;
        for (int64_t j = 0; j < e->count; j++)
            if (!taken[j] && (best < 0 || !(scores[j] <= scores[best]))) best = j;
        taken[best] = 1;
        which[i] = best;
    }
    const float most = scores[which[0]];
    float sum = 0;
    for (int64_t j = 0; j < e->count; j++)
        if (taken[j] || !e->normed) sum += expf(scores[j] - most);
    for (int64_t i = 0; i < e->chosen; i++) weights[i] = expf(scores[which[i]] - most) / sum;
}

/* Computes `rows` rows of an MLP to `out`. */
static int mlp(const afterglow_experts *e, const afterglow_matrix *matrices, const float *x, int64_t rows, scratch s, int threads, int width) {
    const int64_t wide = matrices[0].outputs;
    int failed = multiply_any(matrices, x, matrices[0].inputs, rows, 0, s.inner, threads, width);
    if (e->clamp.limit > 0) afterglow_gated_clamped(&e->clamp, s.inner, wide, s.gated, rows, wide / 2, threads, width);
    else afterglow_gated_silu(s.inner, wide, s.gated, rows, wide / 2, threads, width);
    return failed | multiply_any(matrices + 1, s.gated, wide / 2, rows, 0, s.part, threads, width);
}

static void add_weighted(float *out, const float *part, float weight, int64_t size) {
    for (int64_t i = 0; i < size; i++) out[i] += weight * part[i];
}

/* Adds what an expert computes for `count` rows. */
static int add_expert(const afterglow_experts *e, const afterglow_matrix *matrices, const choice *rows, int64_t count, const float *x,
                      float *out, scratch s, int threads, int width) {
    const int64_t hidden = e->router.inputs;
    int failed = 0;
    for (int64_t first = 0; first < count && !failed; first += CHUNK) {
        const int64_t some = count - first < CHUNK ? count - first : CHUNK;
        const choice *own = rows + first;
        for (int64_t i = 0; i < some && count > 1; i++) memcpy(s.x + i * hidden, x + own[i].row * hidden, hidden * sizeof *x);
        failed = mlp(e, matrices, count > 1 ? s.x : x + own->row * hidden, some, s, threads, width);
        for (int64_t i = 0; i < some; i++) add_weighted(out + own[i].row * hidden, s.part + i * hidden, own[i].weight, hidden);
    }
    return failed;
}

static int add_shared(const afterglow_experts *e, const float *x, float *out, int64_t rows, scratch s, int threads, int width) {
    const int64_t hidden = e->router.inputs;
    int failed = 0;
    for (int64_t first = 0; first < rows && !failed; first += CHUNK) {
        const int64_t some = rows - first < CHUNK ? rows - first : CHUNK;
        failed = mlp(e, e->shared, x + first * hidden, some, s, threads, width);
        failed |= multiply_any(e->shared + 2, x + first * hidden, hidden, some, 0, s.inner, threads, width);
        for (int64_t i = 0; i < some; i++)
            add_weighted(out + (first + i) * hidden, s.part + i * hidden, 1 / (1 + expf(-s.inner[i])), hidden);
    }
    return failed;
}

int add_experts(const afterglow_experts *e, const float *x, float *out, int64_t rows, int threads, int width) {
    const int64_t hidden = e->router.inputs, count = e->count, chosen = e->chosen, most = rows < CHUNK ? rows : CHUNK;
    const int64_t own = e->matrices->outputs, of_shared = e->shared ? e->shared->outputs : 0, wide = own > of_shared ? own : of_shared;
    /* Scores and weights; then, for each row, which experts it takes, and for each expert its rows and where they begin. */
    float *scores = malloc((rows * (count + chosen) + most * (2 * hidden + wide + wide / 2)) * sizeof *scores);
    int64_t *which = malloc((rows * chosen + count + 1) * sizeof *which), *begin = which + rows * chosen;
    choice *sorted = malloc(rows * chosen * sizeof *sorted);
    uint8_t *taken = malloc(count);
    float *weights = scores + rows * count;
    scratch s = {.x = weights + rows * chosen};
    s.part = s.x + most * hidden, s.inner = s.part + most * hidden, s.gated = s.inner + most * wide;
    int failed = !scores || !which || !sorted || !taken || multiply_any(&e->router, x, hidden, rows, 0, scores, threads, width);
    if (!failed) {
        memset(begin, 0, (count + 1) * sizeof *begin);
        for (int64_t row = 0; row < rows; row++) choose(e, scores + row * count, taken, which + row * chosen, weights + row * chosen);
        for (int64_t i = 0; i < rows * chosen; i++) begin[which[i] + 1]++;
        for (int64_t i = 0; i < count; i++) begin[i + 1] += begin[i];
        for (int64_t i = 0; i < rows * chosen; i++) sorted[begin[which[i]]++] = (choice){i / chosen, weights[i]};
    }
    for (int64_t i = 0, first = 0; i < count && !failed; first = begin[i++]) /* `begin` has moved on to the next one's first */
        if (begin[i] > first) failed = add_expert(e, e->matrices + 2 * i, sorted + first, begin[i] - first, x, out, s, threads, width);
    if (!failed && e->shared) failed = add_shared(e, x, out, rows, s, threads, width);
    free(scores), free(which), free(sorted), free(taken);
    return failed;
}
