/* Attention maps times values. Included once for each V. */

#undef COLUMNS
#define COLUMNS (V == 16 ? 4 : 2) /* vectors of a head that are computed together */
#define ROWS 4                    /* and rows */

INLINE vec NAME(numbers)(const void *x, int64_t kind, int64_t i) {
    if (kind == AFTERGLOW_FLOAT16) return from_half((const uint16_t *)x + i);
    return load((const float *)x + i);
}

/* to[0 .. count) (+)= weight * x[0 .. count), as whole vectors: `to` has room for another one, x may end with its last number. */
INLINE void NAME(weigh)(const void *x, int64_t kind, int64_t count, float weight, int add, float *to) {
    const int64_t whole = count / V * V, bytes = kind == AFTERGLOW_FLOAT16 ? 2 : 4;
    float end[V] = {0};
    for (int64_t i = 0; i < whole; i += V) {
        const vec y = NAME(numbers)(x, kind, i);
        store(to + i, add ? fused(y, all(weight), load(to + i)) : y * weight);
    }
    if (whole == count) return;
    memcpy(end, (const char *)x + whole * bytes, (count - whole) * bytes);
    const vec y = NAME(numbers)(end, kind, 0);
    store(to + whole, add ? fused(y, all(weight), load(to + whole)) : y * weight);
}

/* Rows of a map times V * columns numbers of each value. The first row has `seen` numbers, and so have the others, or, where it is
   causal, each has one more than the one before. */
INLINE void NAME(apply_tile)(const float *const *map, int64_t seen, int causal, const float *values, int64_t stride, float *out,
                             int64_t out_stride, int rows, int columns) {
    vec sums[ROWS][COLUMNS] = {{{0}}};
    for (int64_t j = 0; j < seen; j++)
        UNROLL(4) for (int c = 0; c < columns; c++) {
            const vec value = load(values + j * stride + c * V);
            UNROLL(4) for (int r = 0; r < rows; r++) sums[r][c] = fused(all(map[r][j]), value, sums[r][c]);
        }
    for (int r = 1; causal && r < rows; r++)
        for (int64_t j = seen; j < seen + r; j++)
            for (int c = 0; c < columns; c++) sums[r][c] = fused(all(map[r][j]), load(values + j * stride + c * V), sums[r][c]);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store(out + r * out_stride + c * V, sums[r][c]);
}

/* The same for ROWS rows if there are so `many`, else for one. */
INLINE void NAME(apply_columns)(const float *const *map, int64_t seen, int causal, const float *values, int64_t stride, float *out,
                                int64_t out_stride, int many, int columns) {
    if (many)
        NAME(apply_tile)(map, seen, causal, values, stride, out, out_stride, ROWS, columns);
    else
        NAME(apply_tile)(map, seen, causal, values, stride, out, out_stride, 1, columns);
}

/* One head: `map`, packed, times values [length], rows to `out`. */
static void NAME(apply_head)(const float *map, const afterglow_maps *maps, const float *values, float *out) {
    const int64_t length = maps->length, stride = maps->value_stride, out_stride = maps->heads * maps->head_dim;
    const int64_t vectors = maps->head_dim / V;
    const int causal = maps->causal != 0;
    for (int64_t row = 0; row < length;) {
        const int many = row + ROWS <= length;
        const float *rows[ROWS] = {0};
        for (int r = 0; r < (many ? ROWS : 1); r++) rows[r] = map + (causal ? (row + r) * (row + r + 1) / 2 : (row + r) * length);
        const int64_t seen = causal ? row + 1 : length;
        int64_t c = 0;
        for (; c + COLUMNS <= vectors; c += COLUMNS)
            NAME(apply_columns)(rows, seen, causal, values + c * V, stride, out + c * V, out_stride, many, COLUMNS);
        for (; c < vectors; c++)
            NAME(apply_columns)(rows, seen, causal, values + c * V, stride, out + c * V, out_stride, many, 1);
        row += many ? ROWS : 1;
        out += (many ? ROWS : 1) * out_stride;
    }
}

/* Heads [from, to) of all sentences, one sentence's after another's; `map`: room for one of them, and a vector. */
static void NAME(apply_heads)(const afterglow_maps *maps, int64_t from, int64_t to, float *map) {
    const int64_t length = maps->length, numbers = map_numbers(maps);
    const int64_t bytes = numbers * (maps->kind == AFTERGLOW_FLOAT16 ? 2 : 4), group = maps->heads / maps->kv_heads;
    for (int64_t piece = from; piece < to; piece++) {
        const int64_t sentence = piece / maps->heads, head = piece % maps->heads;
        int added = 0;
        for (int64_t part = 0; part < maps->parts; part++) {
            const float weight = maps->weights[sentence * maps->parts + part];
            if (weight == 0) continue;
            const char *stored = ((const char *const *)maps->stored)[sentence * maps->parts + part];
            if (maps->kind == AFTERGLOW_FLOAT16)
                NAME(weigh)(stored + head * bytes, AFTERGLOW_FLOAT16, numbers, weight, added, map);
            else
                NAME(weigh)(stored + head * bytes, AFTERGLOW_FLOAT32, numbers, weight, added, map);
            added = 1;
        }
        const float *values = maps->values + sentence * length * maps->value_stride + head / group * maps->head_dim;
        NAME(apply_head)(map, maps, values, maps->out + (maps->rows[sentence] * maps->heads + head) * maps->head_dim);
    }
}
#undef V
