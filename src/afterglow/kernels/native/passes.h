/* One row each. Included by passes.c once for each V, floats in a vector, after vectors.h. */

typedef uint8_t NAME(bytes) __attribute__((vector_size(V)));
typedef int8_t NAME(small) __attribute__((vector_size(V)));

/* Rotates a head's first `dim` numbers, in halves that turn together. */
static void NAME(rotate)(const float *x, const float *cos, const float *sin, float *out, int64_t dim) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + V <= half; i += V) {
        const vec low = load(x + i), high = load(x + half + i);
        store(out + i, low * load(cos + i) + high * load(sin + i));
        store(out + half + i, high * load(cos + half + i) + low * load(sin + half + i));
    }
    for (; i < half; i++) {
        const float low = x[i], high = x[half + i];
        out[i] = low * cos[i] + high * sin[i];
        out[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

static void NAME(norm)(const float *x, const float *weight, float eps, float *out, int64_t n) {
    vec squares[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * V <= n; i += 4 * V)
UNROLL(4)
        for (int j = 0; j < 4; j++) squares[j] += load(x + i + j * V) * load(x + i + j * V);
    const vec whole = squares[0] + squares[1] + squares[2] + squares[3];
    float sum = 0;
    for (; i < n; i++) sum += x[i] * x[i];
    for (int j = 0; j < V; j++) sum += whole[j];
    const float scale = 1 / sqrtf(sum / n + eps);
    for (i = 0; i + V <= n; i += V) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* x / (1 + e^-x), with e^-|x|, which never overflows. */
INLINE vec NAME(silu)(vec x) {
    const vec small = NAME(exponential)((vec)((bits)x | INT32_MIN));
    const bits negative = x < 0;
    const vec one = (vec){0} + 1.0f;
    return x * (vec)(((bits)small & negative) | ((bits)one & ~negative)) / (small + 1.0f);
}

static void NAME(gate)(const float *gate, const float *up, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + V <= n; i += V) store(out + i, NAME(silu)(load(gate + i)) * load(up + i));
    if (i == n) return;
    float edge[V] = {0};
    memcpy(edge, gate + i, (n - i) * sizeof *edge);
    store(edge, NAME(silu)(load(edge)));
    for (int64_t j = 0; i + j < n; j++) out[i + j] = edge[j] * up[i + j];
}

/* Gates cut from above, numbers from both sides; NaN stays NaN. */
INLINE vec NAME(clamped)(vec gate, vec up, afterglow_clamp clamp) {
    const vec most = (vec){0} + clamp.limit;
    const bits high = gate > most, above = up > most, below = up < -most;
    gate = (vec)(((bits)most & high) | ((bits)gate & ~high));
    up = (vec)(((bits)most & above) | ((bits)-most & below) | ((bits)up & ~above & ~below));
    return NAME(silu)(gate * clamp.alpha) / clamp.alpha * (up + 1.0f);
}

static void NAME(gate_clamped)(const float *gate, const float *up, float *out, int64_t n, const afterglow_clamp *clamp) {
    int64_t i = 0;
    for (; i + V <= n; i += V) store(out + i, NAME(clamped)(load(gate + i), load(up + i), *clamp));
    if (i == n) return;
    float edge[V] = {0}, other[V] = {0};
    memcpy(edge, gate + i, (n - i) * sizeof *edge);
    memcpy(other, up + i, (n - i) * sizeof *other);
    store(edge, NAME(clamped)(load(edge), load(other), *clamp));
    memcpy(out + i, edge, (n - i) * sizeof *edge);
}

/* The largest magnitude as the integer of the same bits: magnitudes compare as integers do, and what is not finite is larger than
   all others. */
static int32_t NAME(largest)(const float *x, int64_t n) {
    bits most = {0};
    int64_t i = 0;
    for (; i + V <= n; i += V) {
        const bits magnitude = (bits)load(x + i) & INT32_MAX, which = magnitude > most;
        most = (magnitude & which) | (most & ~which);
    }
    int32_t peak = 0, whole;
    for (; i < n; i++) {
        memcpy(&whole, x + i, sizeof whole);
        peak = (whole & INT32_MAX) > peak ? whole & INT32_MAX : peak;
    }
    for (int j = 0; j < V; j++) peak = most[j] > peak ? most[j] : peak;
    return peak;
}

/* x = scale[0] * (out - levels - 1), out in 8 bits. Returns the scale. */
static float NAME(round)(const float *x, int levels, uint8_t *out, int64_t n) {
    const int32_t most = NAME(largest)(x, n);
    int64_t i;
    float peak;
    memcpy(&peak, &most, sizeof peak);
    peak = peak < FLT_MIN ? FLT_MIN : peak;
    const float scale = peak / levels, zero = levels + 1.5f;
    for (i = 0; i + V <= n; i += V) {
        const bits whole = __builtin_convertvector(load(x + i) / scale + zero, bits); /* positive, so that cutting off rounds */
        const NAME(bytes) narrow = __builtin_convertvector(whole, NAME(bytes));
        memcpy(out + i, &narrow, V);
    }
    for (; i < n; i++) out[i] = (uint8_t)(x[i] / scale + zero);
    return scale;
}

/* A head's numbers in 8 bits, the largest magnitude being 127, and its scale behind them. The scale is a normal number whose 127-fold
   is finite; it is NaN, and so are all numbers, where a number of the head is not finite. */
static void NAME(narrow)(const float *x, int8_t *out, int64_t n) {
    int64_t i;
    const int32_t peak = NAME(largest)(x, n);
    int32_t whole;
    float scale = NAN, largest;
    if (peak < 0x7f800000) {
        memcpy(&largest, &peak, sizeof largest);
        scale = (largest > 127 * FLT_MIN ? largest : 127 * FLT_MIN) / 127;
        scale = scale > MOST_SCALE ? MOST_SCALE : scale;
        for (i = 0; i + V <= n; i += V) {
            const vec rounded = load(x + i) / scale + ROUNDING; /* ties to even */
            const NAME(small) narrow = __builtin_convertvector((bits)rounded - ROUNDING_BITS, NAME(small));
            memcpy(out + i, &narrow, V);
        }
        for (; i < n; i++) {
            const float rounded = x[i] / scale + ROUNDING;
            memcpy(&whole, &rounded, sizeof whole);
            out[i] = (int8_t)(whole - ROUNDING_BITS);
        }
    } else
        memset(out, 0, n);
    memcpy(out + n, &scale, sizeof scale);
}

/* Left to the compiler, which makes vectors of this loop: GCC converts a vector of bytes to floats one by one. */
static void NAME(widen)(const int8_t *restrict x, float *restrict out, int64_t n) {
    float scale;
    memcpy(&scale, x + n, sizeof scale);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale;
}

/* A head of a stored row of `kind` to floats; `n` is a multiple of 16. */
static void NAME(floats)(const void *x, int64_t kind, float *out, int64_t n) {
    const uint16_t *halves = x;
    if (kind == AFTERGLOW_INT8) NAME(widen)(x, out, n);
    else if (kind == AFTERGLOW_FLOAT32) memcpy(out, x, n * sizeof *out);
    else if (kind == AFTERGLOW_FLOAT16)
        for (int64_t i = 0; i < n; i += V) store(out + i, from_half(halves + i));
    else
        for (int64_t i = 0; i < n; i++) {
            const uint32_t number = (uint32_t)halves[i] << 16;
            memcpy(out + i, &number, sizeof number);
        }
}

#undef V
