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
   queries. `more` says that as many rows from `next_keys` and `next_values` on will be wanted soon. */
INLINE void NAME(products)(const float *keys, int64_t apart, const float *q, int64_t d, int rows, int vectors, float *scores, int more,
                           const float *next_keys, const float *next_values) {
    vec a[ROWS][2];
UNROLL(8)
    for (int i = 0; i < rows; i++) a[i][0] = a[i][1] = (vec){0};
    for (int64_t x = 0; x < d; x++) {
        if (more) AHEAD(next_keys, next_values, x * ROWS / 8);
        vec q0 = load(q + x * TILE), q1 = vectors == 2 ? load(q + x * TILE + V) : q0;
UNROLL(8)
        for (int i = 0; i < rows; i++) {
            a[i][0] += q0 * keys[i * apart + x];
            if (vectors == 2) a[i][1] += q1 * keys[i * apart + x];
        }
    }
UNROLL(8)
    for (int i = 0; i < rows; i++) {
        store(scores + i * TILE, a[i][0]);
        if (vectors == 2) store(scores + i * TILE + V, a[i][1]);
    }
}

/* The same for n rows; `more`: ask ahead for the next block's keys, and this block's values. */
INLINE void NAME(score)(const float *keys, const float *q, int64_t d, int64_t n, int vectors, float *scores, int more,
                        const float *values) {
#define PRODUCTS(rows, vectors, more) \
    NAME(products)(keys + i * d, d, q, d, rows, vectors, scores + i * TILE, more, keys + (BLOCK + i) * d, values + i * d)
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

/* out[query] = out[query] * factor[query] + sum over n rows of scores[row * stride + query * apart] * values[row], for `queries`
   queries and `wide` vectors of dimensions (constants). */
INLINE void NAME(weigh)(const float *values, const float *scores, int64_t stride, int64_t apart, const float *factor, int64_t d,
                        int64_t n, int queries, int wide, float *out) {
    vec a[QUERIES][WIDE];
UNROLL(4)
    for (int i = 0; i < queries; i++)
UNROLL(4)
        for (int j = 0; j < wide; j++) a[i][j] = load(out + i * d + j * V) * factor[i];
    for (int64_t row = 0; row < n; row++) {
        vec value[WIDE];
UNROLL(4)
        for (int j = 0; j < wide; j++) value[j] = load(values + row * d + j * V);
UNROLL(4)
        for (int i = 0; i < queries; i++)
UNROLL(4)
            for (int j = 0; j < wide; j++) a[i][j] += value[j] * scores[row * stride + i * apart];
    }
UNROLL(4)
    for (int i = 0; i < queries; i++)
UNROLL(4)
        for (int j = 0; j < wide; j++) store(out + i * d + j * V, a[i][j]);
}

/* The same for any number of queries, all dimensions. */
INLINE void NAME(weigh_all)(const float *values, const float *scores, int64_t stride, int64_t apart, const float *factor, int64_t d,
                            int64_t n, int64_t queries, float *out) {
#define PART(number, wide) \
    NAME(weigh)(values + x, scores + i * apart, stride, apart, factor + i, d, n, number, wide, out + i * d + x)
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

/* Scores of the rows that a query does not see, minus infinity: its weight is 10^-38 of the largest one's, which is nothing. */
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

/* Queries in the lanes of vectors: each key is loaded once for 32 queries, and the softmax needs no sums over lanes. */
static void NAME(many)(const float *keys, const float *values, int64_t rows, softmax s) {
    float factor[TILE];
    const int64_t d = s.d;
    for (int64_t block = 0; block < rows; block += BLOCK) {
        const int64_t end = rows - block < BLOCK ? rows : block + BLOCK;
        for (int64_t first = 0; first < s.queries; first += TILE) {
            const int64_t queries = s.queries - first < TILE ? s.queries - first : TILE;
            const float *q = s.q + first * d;
            /* Rows before all of the tile's windows are not touched: there may be nothing in them. */
            const int64_t seen_from = s.seen ? s.seen[first] - s.window : 0, row = block > seen_from ? block : seen_from, n = end - row;
            if (n <= 0 || (s.seen && row >= s.seen[first + queries - 1])) continue;
            NAME(score)(keys + row * d, q, d, n, queries > V ? 2 : 1, s.scores, first == 0, values + row * d);
            if (s.cap > 0)
                for (int64_t i = 0; i < n; i++)
                    for (int64_t lane = 0; lane < queries; lane += V)
                        store(s.scores + i * TILE + lane, NAME(capped)(load(s.scores + i * TILE + lane), s.cap));
            if (s.seen && (end > s.seen[first] || row < s.seen[first + queries - 1] - s.window))
                NAME(hide)(s.scores, n, queries, row, s.seen + first, s.window);
            for (int64_t lane = 0; lane < queries; lane += V) {
                float *scores = s.scores + lane, *most = s.most + first + lane, *sum = s.sum + first + lane;
                const vec before = load(most);
                vec m = before, total = {0};
                for (int64_t i = 0; i < n; i++) m = NAME(larger)(load(scores + i * TILE), m);
                for (int64_t i = 0; i < n; i++) {
                    vec weight = NAME(exponential)(load(scores + i * TILE) - m);
                    store(scores + i * TILE, weight);
                    total += weight;
                }
                vec f = NAME(exponential)(before - m);
                store(factor + lane, f);
                store(most, m);
                store(sum, load(sum) * f + total);
            }
            NAME(weigh_all)(values + row * d, s.scores, TILE, 1, factor, d, n, queries, s.out + first * d);
        }
    }
}

/* A head's dimensions in the lanes of vectors; scores one query after another, at most MAX_FEW queries. */
static void NAME(few)(const float *keys, const float *values, int64_t rows, softmax s) {
    float factor[MAX_FEW];
    const int64_t d = s.d;
    for (int64_t row = 0; row < rows; row += BLOCK) {
        const int64_t n = rows - row < BLOCK ? rows - row : BLOCK;
        const float *k = keys + row * d;
        for (int64_t query = 0; query < s.queries; query++) {
            const float *q = s.q + query * d;
            float *scores = s.scores + query * BLOCK;
            int64_t i = 0;
            for (; i + V <= n; i += V) {
                if (query == 0)
                    for (int64_t x = 0; x < V * d; x += 16) {
                        __builtin_prefetch(values + (row + i) * d + x, 0, 2);
                        __builtin_prefetch(k + (BLOCK + i) * d + x, 0, 2);
                    }
                vec a[V];
UNROLL(16)
                for (int j = 0; j < V; j++) {
                    a[j] = (vec){0};
                    for (int64_t x = 0; x < d; x += V) a[j] += load(k + (i + j) * d + x) * load(q + x);
                }
                store(scores + i, NAME(sums)(a));
            }
            for (; i < n; i++) {
                vec a = {0};
                for (int64_t x = 0; x < d; x += V) a += load(k + i * d + x) * load(q + x);
                scores[i] = 0;
                for (int j = 0; j < V; j++) scores[i] += a[j];
            }
            if (s.cap > 0)
                for (int64_t j = 0; j < n; j += V) store(scores + j, NAME(capped)(load(scores + j), s.cap));
            for (; i % V; i++) scores[i] = -FLT_MAX; /* weighs 10^-38 */
            const float before = s.most[query];
            vec m = load(scores), total = {0};
            for (int64_t j = V; j < i; j += V) m = NAME(larger)(load(scores + j), m);
            float most = before;
            for (int j = 0; j < V; j++) most = m[j] > most ? m[j] : most;
            for (int64_t j = 0; j < i; j += V) {
                vec weight = NAME(exponential)(load(scores + j) - most);
                store(scores + j, weight);
                total += weight;
            }
            factor[query] = expf(before - most);
            float sum = s.sum[query] * factor[query];
            for (int j = 0; j < V; j++) sum += total[j];
            s.sum[query] = sum;
            s.most[query] = most;
        }
        NAME(weigh_all)(values + row * d, s.scores, 1, BLOCK, factor, d, n, s.queries, s.out);
    }
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
