/* A tile of rows by one panel of a matrix. Included by matrix.c once for each V, floats in a vector, after vectors.h. */

#define LANES (2 * V)

/* For `rows` rows, a constant: two sums of vectors for each are kept in registers. */
INLINE void NAME(rows_by_panel)(const float *x, int64_t x_stride, const float *panel, int64_t inputs, const float *bias, int add,
                                float *out, int64_t out_stride, int rows) {
    for (int64_t start = 0; start == 0 || start < inputs; start += RUN) {
        const int64_t stop = inputs - start < RUN ? inputs : start + RUN;
        vec a[MAX_ROWS][2];
UNROLL(12)
        for (int row = 0; row < rows; row++) a[row][0] = a[row][1] = (vec){0};
        for (int64_t i = start; i < stop; i++) {
            const vec low = load(panel + i * LANES), high = load(panel + i * LANES + V);
            __builtin_prefetch(panel + i * LANES + AHEAD, 0, 3);
            if (V == 16) __builtin_prefetch(panel + i * LANES + AHEAD + V, 0, 3);
UNROLL(12)
            for (int row = 0; row < rows; row++) {
                const float factor = x[row * x_stride + i];
                a[row][0] += low * factor;
                a[row][1] += high * factor;
            }
        }
UNROLL(12)
        for (int row = 0; row < rows; row++) {
            float *to = out + row * out_stride;
            if (start == 0 && bias) a[row][0] += load(bias), a[row][1] += load(bias + V);
            if (start || add) a[row][0] += load(to), a[row][1] += load(to + V);
            store(to, a[row][0]);
            store(to + V, a[row][1]);
        }
    }
}

static void NAME(multiply_tile)(const float *x, int64_t x_stride, const float *panel, int64_t inputs, const float *bias, int add, float *out,
                       int64_t out_stride, int64_t rows) {
#define ROWS(n) \
    case n: NAME(rows_by_panel)(x, x_stride, panel, inputs, bias, add, out, out_stride, n); break;
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if V == 16
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}

#undef V
#undef LANES
#undef ROWS
