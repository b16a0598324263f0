/* Groups of a panel, and tiles of rows by them. Included by packed.c once for each V, 32-bit numbers in a vector, after the
   operations on bytes. `part`, 0 or 8: which outputs of a panel, where a vector does not take all. Formats, kinds and numbers of
   rows are constants. */

/* A group unpacked: 8 steps of [16 outputs][4 inputs] bytes, then the scales and the second numbers of NAME(group), [16] each. */
#define UNPACKED (STEPS * STEP + 2 * PANEL * 4)

/* A group of a panel. `more`, where the kind has it: minima, second scales, or zeros (whole numbers). */
typedef struct {
    const uint8_t *numbers;
    vec scale, more;
} NAME(group);

/* Scales of MXFP4, half of 2^(e - 127): its values are doubled. */
INLINE vec NAME(power)(const uint8_t *p) {
    const bits e = NAME(widen)(p), small = e < 2;
    return (vec)((((bits){0} + 0x200000) << (e & small) & small) | ((e - 1) << 23 & ~small));
}

/* Finds group `i`. Format 0: of unpacked groups. */
INLINE NAME(group) NAME(find)(int format, const uint8_t *panel, int64_t i, int part) {
    if (!format) {
        const uint8_t *own = panel + i * UNPACKED;
        const float *scale = (const float *)(own + STEPS * STEP) + part;
        return (NAME(group)){.numbers = own, .scale = load(scale), .more = load(scale + PANEL)};
    }
    const packed_format f = packed_formats[format];
    const int groups = f.weights / GROUP;
    const uint8_t *head = panel + i / groups * block_bytes(f), *own = head + f.head + i % groups * group_bytes(f);
    NAME(group) found = {.numbers = own + f.sub};
    for (int at = 0; at < group_bytes(f); at += 64) __builtin_prefetch(own + AHEAD + at, 0, 3);
    if (format == AFTERGLOW_MXFP4) {
        found.scale = NAME(power)(head + part);
    } else if (f.kind == ZEROS) {
        found.scale = load((const float *)head + part);
        found.more = (vec)NAME(widen)(head + 4 * PANEL + part);
    } else {
        found.scale = NAME(from_half)(head + 2 * part);
        if (f.kind == HALVES) {
            found.more = found.scale * NAME(floats)(NAME(widen_signed)(own + PANEL + part));
            found.scale *= NAME(floats)(NAME(widen_signed)(own + part));
        } else if (f.kind == ABOVE) {
            found.more = NAME(from_half)(head + 2 * PANEL + 2 * part);
            if (f.sub) found.scale *= NAME(floats)(NAME(widen)(own + part));
            if (f.sub) found.more *= -NAME(floats)(NAME(widen)(own + PANEL + part));
        }
    }
    return found;
}

/* Steps low_step(kind, j) and high_step(kind, j) of a group, one number in each byte. */
INLINE void NAME(two_steps)(int format, int kind, const uint8_t *numbers, int j, int part, NAME(bytes) *low, NAME(bytes) *high) {
    const packed_format f = packed_formats[format];
    numbers += part * 4;
    if (!format || f.wide == 8) {
        *low = NAME(load)(numbers + low_step(kind, j) * STEP);
        *high = NAME(load)(numbers + high_step(kind, j) * STEP);
        return;
    }
    const NAME(bytes) two = NAME(load)(numbers + j * STEP);
    *low = NAME(low_half)(two), *high = NAME(high_half)(two);
    if (format == AFTERGLOW_MXFP4) *low = NAME(pick)(*low), *high = NAME(pick)(*high);
UNROLL(2)
    for (int plane = 0; plane < 2; plane++) {
        if (plane >= f.wide - 4) break;
        const uint8_t *mask = numbers - part * 4 + (4 + plane) * STEP + part / 2;
        *low = NAME(with_bits)(*low, mask + low_step(kind, j) * 8, 16 << plane);
        *high = NAME(with_bits)(*high, mask + high_step(kind, j) * 8, 16 << plane);
    }
}

/* Unpacks groups [first, first + count). */
INLINE void NAME(unpack)(int format, const uint8_t *panel, int64_t first, int64_t count, uint8_t *to) {
    const int kind = packed_formats[format].kind;
    for (int64_t i = first; i < first + count; i++, to += UNPACKED)
        for (int part = 0; part < PANEL; part += V) {
            const NAME(group) group = NAME(find)(format, panel, i, part);
            float *scale = (float *)(to + STEPS * STEP) + part;
            store(scale, group.scale);
            if (kind != CENTRED && kind != CENTRED_WIDE) store(scale + PANEL, group.more);
UNROLL(4)
            for (int j = 0; j < STEPS / 2; j++) {
                NAME(bytes) low, high;
                NAME(two_steps)(format, kind, group.numbers, j, part, &low, &high);
                NAME(store)(to + low_step(kind, j) * STEP + part * 4, low);
                NAME(store)(to + high_step(kind, j) * STEP + part * 4, high);
            }
        }
}

/* Adds the products of `rows` rows with `groups` groups to sums [rows][16]. A group of a row, ROUNDED(kind) bytes: 32 numbers, the
   scale, and what the sum over the group adds. */
INLINE void NAME(tile)(int format, int kind, const uint8_t *x, const uint8_t *panel, int64_t groups, float *out, int rows) {
    const int own = ROUNDED(kind);
    for (int part = 0; part < PANEL; part += V) {
        vec a[ROWS];
UNROLL(12)
        for (int row = 0; row < rows; row++) a[row] = load(out + row * PANEL + part);
        for (int64_t i = 0; i < groups; i++) {
            const uint8_t *from = x + i * rows * own;
            const NAME(group) group = NAME(find)(format, panel, i, part);
UNROLL(2)
            for (int half = 0; half < 2; half++) {
                if (half && kind != HALVES) break;
                bits sums[ROWS];
UNROLL(12)
                for (int row = 0; row < rows; row++) {
                    const bits start = NAME(spread)(from + row * own + 36 + 4 * half);
                    sums[row] = kind == ABOVE ? (bits){0} : kind == ZEROS ? NAME(short_products)((bits)group.more, start) : start;
                }
UNROLL(4)
                for (int j = 0; j < STEPS / 2; j++) {
                    if (kind == HALVES && j / 2 != half) continue;
                    NAME(bytes) low, high;
                    NAME(two_steps)(format, kind, group.numbers, j, part, &low, &high);
UNROLL(12)
                    for (int row = 0; row < rows; row++)
                        sums[row] = NAME(dot)(kind == CENTRED_WIDE || kind == ZEROS, sums[row], low, high,
                                              from + row * own + 4 * low_step(kind, j), from + row * own + 4 * high_step(kind, j));
                }
UNROLL(12)
                for (int row = 0; row < rows; row++) {
                    vec sum = NAME(floats)(sums[row]) * (half ? group.more : group.scale);
                    if (kind == ABOVE) sum = NAME(fused)(group.more, (vec)NAME(spread)(from + row * own + 36), sum);
                    a[row] = NAME(fused)(sum, (vec)NAME(spread)(from + row * own + 32), a[row]);
                }
            }
        }
UNROLL(12)
        for (int row = 0; row < rows; row++) store(out + row * PANEL + part, a[row]);
    }
}

/* Tiles of each number of rows: of panels for a few rows, of unpacked groups for all. */
#define CASE(n, format, kind) \
    case n: NAME(tile)(format, kind, x, panel, groups, out, n); break;
#if V == 16
#define FEW(...) CASE(1, __VA_ARGS__) CASE(2, __VA_ARGS__) CASE(3, __VA_ARGS__) CASE(4, __VA_ARGS__) CASE(5, __VA_ARGS__) \
    CASE(6, __VA_ARGS__) CASE(7, __VA_ARGS__) CASE(8, __VA_ARGS__)
#define ALL(...) FEW(__VA_ARGS__) CASE(9, __VA_ARGS__) CASE(10, __VA_ARGS__) CASE(11, __VA_ARGS__) CASE(12, __VA_ARGS__)
#else
#define FEW(...) CASE(1, __VA_ARGS__)
#define ALL(...) FEW(__VA_ARGS__) CASE(2, __VA_ARGS__) CASE(3, __VA_ARGS__) CASE(4, __VA_ARGS__)
#endif
#define TILES(name, cases, format, kind)                                                                                       \
    static void NAME(name)(const uint8_t *x, const uint8_t *panel, int64_t groups, float *out, int64_t rows) {           \
        switch (rows) { cases(format, kind) }                                                                         \
    }
#define FORMAT(name)                                                                                                    \
    static void NAME(unpack_##name)(const uint8_t *panel, int64_t first, int64_t count, uint8_t *to) {                   \
        NAME(unpack)(AFTERGLOW_##name, panel, first, count, to);                                                         \
    }                                                                                                                    \
    TILES(tile_##name, FEW, AFTERGLOW_##name, packed_formats[AFTERGLOW_##name].kind)

EVERY_FORMAT(FORMAT)
TILES(tile_of_centred, ALL, 0, CENTRED)
TILES(tile_of_wide, ALL, 0, CENTRED_WIDE)
TILES(tile_of_above, ALL, 0, ABOVE)
TILES(tile_of_halves, ALL, 0, HALVES)
TILES(tile_of_zeros, ALL, 0, ZEROS)

static const packed_work NAME(work)[] = {
#define ENTRY(name) [AFTERGLOW_##name] = {NAME(unpack_##name), NAME(tile_##name)},
    EVERY_FORMAT(ENTRY)
};
static packed_tile *const NAME(tiles)[] = {
    [CENTRED] = NAME(tile_of_centred), [CENTRED_WIDE] = NAME(tile_of_wide), [ABOVE] = NAME(tile_of_above),
    [HALVES] = NAME(tile_of_halves), [ZEROS] = NAME(tile_of_zeros),
};

#undef CASE
#undef FEW
#undef ALL
#undef TILES
#undef FORMAT
#undef ENTRY
#undef V
