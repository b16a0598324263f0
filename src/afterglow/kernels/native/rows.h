/* Attention over rows of one KV head. Included by segments.c once for each V, floats in a vector, after vectors.h. */

#define TILE (2 * V) /* queries in the lanes of two vectors */
#if V == 8           /* ROWS x 2 and QUERIES x WIDE sums are kept in registers: 16 here, 32 elsewhere */
#define ROWS 4
#define WIDE 2
#else
#define ROWS 8
#define WIDE 4
#endif
#define QUERIES 4

typedef int32_t NAME(loose_bits) __attribute__((vector_size(4 * V), aligned(4)));

/* The sums of V vectors' lanes, as one vector. */
INLINE vec NAME(sums)(vec *a) {
#define HALVE(n, low, high) \
    for (int i = 0; i < n; i++) \
        a[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], low) + __builtin_shufflevector(a[2 * i], a[2 * i + 1], high)
#define LANES(...) __VA_ARGS__
#if V == 16
    HALVE(8, LANES(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
          LANES(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
    HALVE(4, LANES(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          LANES(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    HALVE(2, LANES(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
          LANES(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    HALVE(1, LANES(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          LANES(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#else
    HALVE(4, LANES(0, 8, 2, 10, 4, 12, 6, 14), LANES(1, 9, 3, 11, 5, 13, 7, 15));
    HALVE(2, LANES(0, 1, 8, 9, 4, 5, 12, 13), LANES(2, 3, 10, 11, 6, 7, 14, 15));
    HALVE(1, LANES(0, 1, 2, 3, 8, 9, 10, 11), LANES(4, 5, 6, 7, 12, 13, 14, 15));
#endif
    return a[0];
}

/* What the second cache is asked for ahead of time: d lines, one for each step of a loop over d. The processor's own guess does
   not see ahead where rows are read side by side (group of 32 queries: 2.8 ms to 2.3 ms). */
#define AHEAD(keys, values, step) __builtin_prefetch(((step) & 1 ? (values) : (keys)) + (step) / 2 * 16, 0, 2)

/* scores[row][lane] = keys[row] . q[][lane] for `rows` rows (a constant), `apart` floats apart, and `vectors` (1 or 2) vectors of
   queries. Added up in the order that `few` needs: the products of each quarter of a vector's dimensions one after another, then quarters. `more`
   says that as many rows from `next_keys` and `next_values` on will be wanted soon. */
INLINE void NAME(products)(const float *keys, int64_t apart, const float *q, int64_t d, int rows, int vectors, float *scores, int more,
                           const float *next_keys, const float *next_values) {
    for (int64_t quarter = 0; quarter < V; quarter += 4) {
        vec a[ROWS][2];
UNROLL(8)
        for (int i = 0; i < rows; i++) a[i][0] = a[i][1] = (vec){0};
        for (int64_t from = quarter; from < d; from += V)
UNROLL(4)
            for (int64_t x = from; x < from + 4; x++) {
                if (more) AHEAD(next_keys, next_values, x * ROWS / 8);
                vec q0 = load(q + x * TILE), q1 = vectors == 2 ? load(q + x * TILE + V) : q0;
UNROLL(8)
                for (int i = 0; i < rows; i++) {
                    a[i][0] = fused(q0, all(keys[i * apart + x]), a[i][0]);
                    if (vectors == 2) a[i][1] = fused(q1, all(keys[i * apart + x]), a[i][1]);
                }
            }
UNROLL(8)
        for (int i = 0; i < rows; i++) {
            float *to = scores + i * TILE;
            store(to, quarter ? load(to) + a[i][0] : a[i][0]);
            if (vectors == 2) store(to + V, quarter ? load(to + V) + a[i][1] : a[i][1]);
        }
    }
}

/* The same for n rows; `more`: ask ahead for the next page's keys, and this page's values. */
INLINE void NAME(score)(const float *keys, const float *q, int64_t d, int64_t n, int vectors, float *scores, int more,
                        const float *next, const float *values) {
#define PRODUCTS(rows, vectors, more) \
    NAME(products)(keys + i * d, d, q, d, rows, vectors, scores + i * TILE, more, next + i * d, values + i * d)
    int64_t i = 0;
    if (vectors == 2) {
        if (more)
            for (; i + ROWS <= n; i += ROWS) PRODUCTS(ROWS, 2, 1);
        for (; i + ROWS <= n; i += ROWS) PRODUCTS(ROWS, 2, 0);
        for (; i < n; i++) PRODUCTS(1, 2, 0);
    } else {
        if (more)
            for (; i + ROWS <= n; i += ROWS) PRODUCTS(ROWS, 1, 1);
        for (; i + ROWS <= n; i += ROWS) PRODUCTS(ROWS, 1, 0);
        for (; i < n; i++) PRODUCTS(1, 1, 0);
    }
}

/* part[query] = sum over n rows of scores[row * stride + query * apart] * values[row], row after row; out[query] = out[query] *
   before[query] + part[query] * after[query]: for `queries` queries and `wide` vectors of dimensions (constants). */
INLINE void NAME(weigh)(const float *values, const float *scores, int64_t stride, int64_t apart, const float *before, const float *after,
                        int64_t d, int64_t n, int queries, int wide, float *out) {
    vec a[QUERIES][WIDE];
UNROLL(4)
    for (int i = 0; i < queries; i++)
UNROLL(4)
        for (int j = 0; j < wide; j++) a[i][j] = (vec){0};
    for (int64_t row = 0; row < n; row++) {
        vec value[WIDE];
UNROLL(4)
        for (int j = 0; j < wide; j++) value[j] = load(values + row * d + j * V);
UNROLL(4)
        for (int i = 0; i < queries; i++)
UNROLL(4)
            for (int j = 0; j < wide; j++) a[i][j] = fused(value[j], all(scores[row * stride + i * apart]), a[i][j]);
    }
UNROLL(4)
    for (int i = 0; i < queries; i++)
UNROLL(4)
        for (int j = 0; j < wide; j++) store(out + i * d + j * V, fused(load(out + i * d + j * V), all(before[i]), a[i][j] * all(after[i])));
}

/* The same for any number of queries, all dimensions. */
INLINE void NAME(weigh_all)(const float *values, const float *scores, int64_t stride, int64_t apart, const float *before,
                            const float *after, int64_t d, int64_t n, int64_t queries, float *out) {
#define PART(number, wide) \
    NAME(weigh)(values + x, scores + i * apart, stride, apart, before + i, after + i, d, n, number, wide, out + i * d + x)
#define WEIGH(number)                                           \
    {                                                           \
        int64_t x = 0;                                          \
        for (; x + WIDE * V <= d; x += WIDE * V) PART(number, WIDE); \
        for (; x < d; x += V) PART(number, 1);                  \
    }
    int64_t i = 0;
    for (; i + QUERIES <= queries; i += QUERIES) WEIGH(QUERIES)
    if (queries - i == 3) WEIGH(3)
    if (queries - i == 2) WEIGH(2)
    if (queries - i == 1) WEIGH(1)
}

/* Scores of the rows that a query does not see, minus infinity: see `weights`. */
static void NAME(hide)(float *scores, int64_t n, int64_t queries, int64_t row, const int32_t *seen, int32_t window) {
    for (int64_t lane = 0; lane < queries; lane += V) {
        const bits until = *(const NAME(loose_bits) *)(seen + lane);
        for (int64_t i = 0; i < n; i++) {
            bits hidden = (until <= (int32_t)(row + i)) | (until - window > (int32_t)(row + i)), score = (bits)load(scores + i * TILE + lane);
            store(scores + i * TILE + lane, (vec)((score & ~hidden) | ((bits)((vec){0} - INFINITY) & hidden)));
        }
    }
}

/* sums[row] += what the softmax of `queries` queries over all rows gives to each of the first `rows`: column sums of the weights.
   Their keys are `apart` floats apart, and the keys of `own` more rows, `own_apart`. A query sees as many own rows as `seen` says. `rest`
   [queries], or null, are log-sum-exps of what they attend to besides. q [d][TILE], scores [rows + own, rounded up to V][TILE]. */
static void NAME(columns)(const float *keys, int64_t apart, int64_t rows, const float *own_keys, int64_t own_apart, int64_t own,
                          const float *q, int64_t d, int64_t queries, const int32_t *seen, const float *rest, float *scores,
                          float *sums) {
    const int vectors = queries > V ? 2 : 1;
    for (int which = 0; which < 2; which++) {
        const float *k = which ? own_keys : keys;
        const int64_t n = which ? own : rows, stride = which ? own_apart : apart;
        float *to = scores + (which ? rows : 0) * TILE;
        int64_t i = 0;
        if (vectors == 2)
            for (; i + ROWS <= n; i += ROWS) NAME(products)(k + i * stride, stride, q, d, ROWS, 2, to + i * TILE, 0, 0, 0);
        else
            for (; i + ROWS <= n; i += ROWS) NAME(products)(k + i * stride, stride, q, d, ROWS, 1, to + i * TILE, 0, 0, 0);
        for (; i < n; i++) NAME(products)(k + i * stride, stride, q, d, 1, 2, to + i * TILE, 0, 0, 0);
    }
    NAME(hide)(scores + rows * TILE, own, queries, 0, seen, NO_WINDOW);
    for (int64_t lane = 0; lane < queries; lane += V) {
        float *from = scores + lane, edge[V];
        const int64_t lanes = queries - lane < V ? queries - lane : V;
        vec m = (vec){0} - FLT_MAX, total = {0};
        if (rest) {
            for (int j = 0; j < V; j++) edge[j] = j < lanes ? rest[lane + j] : -FLT_MAX;
            m = NAME(larger)(load(edge), m);
        }
        for (int64_t i = 0; i < rows + own; i++) m = NAME(larger)(load(from + i * TILE), m);
        if (rest) total = NAME(exponential)(load(edge) - m);
        for (int64_t i = 0; i < rows + own; i++) {
            const vec weight = NAME(exponential)(load(from + i * TILE) - m);
            store(from + i * TILE, weight);
            total += weight;
        }
        vec share = (vec){0} + 1.0f;
        share /= total;
        store(edge, share);
        for (int64_t j = lanes; j < V; j++) edge[j] = 0;
        share = load(edge);
        int64_t i = 0;
        for (; i + V <= rows; i += V) {
            vec a[V];
UNROLL(16)
            for (int j = 0; j < V; j++) a[j] = load(from + (i + j) * TILE) * share;
            store(sums + i, load(sums + i) + NAME(sums)(a));
        }
        for (; i < rows; i++) {
            const vec a = load(from + i * TILE) * share;
            for (int j = 0; j < V; j++) sums[i] += a[j];
        }
    }
}

/* Scores to weights, given the largest one. What is not seen weighs nothing at all. */
INLINE vec NAME(weights)(vec scores, vec most) {
    const bits seen = scores >= -FLT_MAX;
    return (vec)((bits)NAME(exponential)(scores - most) & seen);
}

/* Joins the largest score and the sum of weights of V queries so far with those of further rows. `before` and `after`: what the sums of
   weighted values so far, and those of the further rows, are then multiplied by. Without rows so far, 0 and 1. */
INLINE void NAME(join)(float *most, float *sum, vec further_most, vec further_sum, float *before, float *after) {
    const vec m = NAME(larger)(load(most), further_most);
    const vec a = NAME(exponential)(load(most) - m), b = NAME(exponential)(further_most - m);
    store(sum, fused(load(sum), a, further_sum * b));
    store(most, m);
    store(before, a);
    store(after, b);
}

/* Joins the results of `queries` queries so far with those of further rows. */
static void NAME(merge)(int64_t queries, int64_t d, state now, state further) {
    float most[V], sum[V], further_most[V] = {0}, further_sum[V] = {0}, before[V], after[V];
    for (int64_t first = 0; first < queries; first += V) {
        const int64_t n = queries - first < V ? queries - first : V;
        memset(most, 0, sizeof most), memset(sum, 0, sizeof sum);
        memcpy(most, now.most + first, n * sizeof *most), memcpy(further_most, further.most + first, n * sizeof *most);
        memcpy(sum, now.sum + first, n * sizeof *sum), memcpy(further_sum, further.sum + first, n * sizeof *sum);
        NAME(join)(most, sum, load(further_most), load(further_sum), before, after);
        memcpy(now.most + first, most, n * sizeof *most), memcpy(now.sum + first, sum, n * sizeof *sum);
        for (int64_t i = 0; i < n; i++) {
            float *out = now.out + (first + i) * d;
            const float *part = further.out + (first + i) * d;
            for (int64_t x = 0; x < d; x += V) store(out + x, fused(load(out + x), all(before[i]), load(part + x) * all(after[i])));
        }
    }
}

/* Queries in the lanes of vectors: each key is loaded once for 32 queries, and the softmax needs no sums over lanes. */
static void NAME(many)(const float *keys, const float *values, const float *next, int64_t from, int64_t to, softmax s) {
    float before[TILE], after[TILE];
    const int64_t d = s.d, page = from / PAGE * PAGE;
    for (int64_t first = 0; first < s.queries; first += TILE) {
        const int64_t queries = s.queries - first < TILE ? s.queries - first : TILE;
        const float *q = s.q + first * d;
        /* Rows that no query of the tile sees are not touched: there may be nothing in them. */
        const int64_t seen_from = s.seen ? s.seen[first] - s.window : 0, seen_to = s.seen ? s.seen[first + queries - 1] : to;
        const int64_t row = from > seen_from ? from : seen_from, end = to < seen_to ? to : seen_to, n = end - row;
        if (n <= 0) continue;
        float *scores = s.scores + (row - page) * TILE;
        memset(s.scores, 0, (row - page) * TILE * sizeof *scores);
        memset(scores + n * TILE, 0, (page + PAGE - end) * TILE * sizeof *scores);
        NAME(score)(keys + (row - page) * d, q, d, n, queries > V ? 2 : 1, scores, first == 0, next, values + (row - page) * d);
        if (s.cap > 0)
            for (int64_t i = 0; i < n; i++)
                for (int64_t lane = 0; lane < queries; lane += V)
                    store(scores + i * TILE + lane, NAME(capped)(load(scores + i * TILE + lane), s.cap));
        if (s.seen && (end > s.seen[first] || row < s.seen[first + queries - 1] - s.window))
            NAME(hide)(scores, n, queries, row, s.seen + first, s.window);
        for (int64_t lane = 0; lane < queries; lane += V) {
            vec m = (vec){0} - FLT_MAX, total[V];
            for (int64_t i = 0; i < n; i++) m = NAME(larger)(load(scores + i * TILE + lane), m);
            for (int64_t i = 0; i < n; i++) store(scores + i * TILE + lane, NAME(weights)(load(scores + i * TILE + lane), m));
UNROLL(16)
            for (int j = 0; j < V; j++) {
                total[j] = load(s.scores + j * TILE + lane);
UNROLL(8)
                for (int i = V; i < PAGE; i += V) total[j] += load(s.scores + (i + j) * TILE + lane);
            }
UNROLL(4)
            for (int half = V / 2; half; half /= 2)
UNROLL(8)
                for (int j = 0; j < half; j++) total[j] += total[j + half];
            NAME(join)(s.now.most + first + lane, s.now.sum + first + lane, m, total[0], before + lane, after + lane);
        }
        NAME(weigh_all)(values + (row - page) * d, scores, TILE, 1, before, after, d, n, queries, s.now.out + first * d);
    }
}

/* Four vectors become the first numbers of each of their quarters, side by side, the second ones, and so on. */
INLINE void NAME(turn)(vec *a) {
#if V == 16
#define LOW LANES(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH LANES(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#else
#define LOW LANES(0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH LANES(2, 10, 3, 11, 6, 14, 7, 15)
#endif
#define ZIP(a, b, lanes) __builtin_shufflevector(a, b, lanes)
    const vec b[4] = {ZIP(a[0], a[2], LOW), ZIP(a[1], a[3], LOW), ZIP(a[0], a[2], HIGH), ZIP(a[1], a[3], HIGH)};
    a[0] = ZIP(b[0], b[1], LOW), a[1] = ZIP(b[0], b[1], HIGH), a[2] = ZIP(b[2], b[3], LOW), a[3] = ZIP(b[2], b[3], HIGH);
}

/* The sums over the quarters of V / 4 vectors: a quarter of each vector, side by side, then the next ones, are added up. */
INLINE vec NAME(quarters)(const vec *a) {
#if V == 16
    const vec low = __builtin_shufflevector(a[0], a[1], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const vec more_low = __builtin_shufflevector(a[2], a[3], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const vec high = __builtin_shufflevector(a[0], a[1], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const vec more_high = __builtin_shufflevector(a[2], a[3], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#define FIRST LANES(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define SECOND LANES(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
    return ZIP(low, more_low, FIRST) + ZIP(low, more_low, SECOND) + ZIP(high, more_high, FIRST) + ZIP(high, more_high, SECOND);
#undef FIRST
#undef SECOND
#else
    return __builtin_shufflevector(a[0], a[1], 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a[0], a[1], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

/* scores[query][lane] = keys[lane] . q[query] for V rows and `queries` queries (a constant), as `products` adds them up. Rows outside
   [from, to) are taken to be the nearest one inside, unless all are inside (`whole`, a constant). q [queries][d / V][4][V]: numbers of
   each quarter, four times. */
INLINE void NAME(row_products)(const float *keys, int64_t row, int64_t from, int64_t to, int whole, const float *q, int64_t d, int queries,
                               float *scores) {
    vec sum[QUERIES][V / 4];
UNROLL(4)
    for (int i = 0; i < queries; i++)
UNROLL(4)
        for (int four = 0; four < V / 4; four++) sum[i][four] = (vec){0};
    for (int64_t x = 0; x < d; x += V) {
        vec a[V / 4][4];
UNROLL(4)
        for (int four = 0; four < V / 4; four++) {
UNROLL(4)
            for (int j = 0; j < 4; j++) {
                const int64_t i = row + 4 * four + j, own = whole ? i : i < from ? from : i < to ? i : to - 1;
                a[four][j] = load(keys + own * d + x);
            }
            NAME(turn)(a[four]);
        }
UNROLL(4)
        for (int j = 0; j < 4; j++)
UNROLL(4)
            for (int i = 0; i < queries; i++) {
                const vec numbers = load(q + (i * d + x) * 4 + j * V);
UNROLL(4)
                for (int four = 0; four < V / 4; four++) sum[i][four] = fused(a[four][j], numbers, sum[i][four]);
            }
    }
UNROLL(4)
    for (int i = 0; i < queries; i++) store(scores + i * PAGE, NAME(quarters)(sum[i]));
}

/* The largest of a vector's lanes, and their sum as `many` adds up: halves, then their halves, and so on. */
#if V == 16
#define ROUND(a, by) __builtin_shufflevector(a, a, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7, 0, 1, 2, 3, 4, 5, 6, 7)
#define HALVES(step) step(8) step(4) step(2) step(1)
#else
#define ROUND(a, by) __builtin_shufflevector(a, a, by, by + 1, by + 2, by + 3, 0, 1, 2, 3)
#define HALVES(step) step(4) step(2) step(1)
#endif
INLINE float NAME(largest)(vec a) {
#define STEP(by) a = NAME(larger)(ROUND(a, by), a);
    HALVES(STEP)
#undef STEP
    return a[0];
}

INLINE float NAME(sum)(vec a) {
#define STEP(by) a += ROUND(a, by);
    HALVES(STEP)
#undef STEP
    return a[0];
}

/* Rows in the lanes of vectors, at most MAX_FEW queries, which see all of them. */
static void NAME(few)(const float *keys, const float *values, const float *next, int64_t from, int64_t to, softmax s) {
    float most[V], sum[V] = {0}, before[V], after[V], page_most[V] = {0}, page_sum[V] = {0};
    const int64_t d = s.d, row = from % PAGE, end = row + to - from, first = row / V * V, last = (end + V - 1) / V * V;
    if (to <= from) return;
    memset(most, 0, sizeof most);
    memcpy(most, s.now.most, s.queries * sizeof *most), memcpy(sum, s.now.sum, s.queries * sizeof *sum);
    for (int64_t i = first; i < last; i += V) {
        for (int64_t x = 0; x < V * d; x += 16) {
            __builtin_prefetch(values + i * d + x, 0, 2);
            __builtin_prefetch(next + i * d + x, 0, 2);
        }
        const int whole = i >= row && i + V <= end;
#define SCORE(number)                                                                            \
    {                                                                                            \
        const float *q = s.q + query * 4 * d;                                                    \
        float *to = s.scores + query * PAGE + i;                                                 \
        if (whole) NAME(row_products)(keys, i, row, end, 1, q, d, number, to);                   \
        else NAME(row_products)(keys, i, row, end, 0, q, d, number, to);                         \
    }
        int64_t query = 0;
        for (; query + QUERIES <= s.queries; query += QUERIES) SCORE(QUERIES)
        if (s.queries - query == 3) SCORE(3)
        if (s.queries - query == 2) SCORE(2)
        if (s.queries - query == 1) SCORE(1)
    }
    for (int64_t query = 0; query < s.queries; query++) {
        float *scores = s.scores + query * PAGE;
        vec m = (vec){0} - FLT_MAX, total = {0};
        if (s.cap > 0)
            for (int64_t i = first; i < last; i += V) store(scores + i, NAME(capped)(load(scores + i), s.cap));
        for (int64_t i = first; i < row; i++) scores[i] = -INFINITY;
        for (int64_t i = end; i < last; i++) scores[i] = -INFINITY;
        for (int64_t i = first; i < last; i += V) m = NAME(larger)(load(scores + i), m);
        m = all(NAME(largest)(m));
        for (int64_t i = first; i < last; i += V) {
            const vec weights = NAME(weights)(load(scores + i), m);
            store(scores + i, weights);
            total += weights;
        }
        page_most[query] = m[0];
        page_sum[query] = NAME(sum)(total);
    }
    NAME(join)(most, sum, load(page_most), load(page_sum), before, after);
    NAME(weigh_all)(values + row * d, s.scores + row, 1, PAGE, before, after, d, end - row, s.queries, s.now.out);
    memcpy(s.now.most, most, s.queries * sizeof *most), memcpy(s.now.sum, sum, s.queries * sizeof *sum);
}

#undef V
#undef TILE
#undef ROWS
#undef QUERIES
#undef WIDE
#undef HALVE
#undef LANES
#undef AHEAD
#undef PRODUCTS
#undef PART
#undef WEIGH
#undef LOW
#undef HIGH
#undef ZIP
#undef SCORE
#undef ROUND
#undef HALVES
