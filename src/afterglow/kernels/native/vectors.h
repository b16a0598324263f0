/* Vectors of V floats, and e^x. Included once for each V by files that need them; `vec`, `loose` and `bits` end with the next one. */

#undef vec
#undef loose
#undef bits
#undef load
#undef store
#define vec NAME(vec)
#define loose NAME(loose)
#define bits NAME(bits)
#define load(p) ((vec) * (const loose *)(p))
#define store(p, x) (*(loose *)(p) = (loose)(x))

typedef float vec __attribute__((vector_size(4 * V)));
typedef float loose __attribute__((vector_size(4 * V), aligned(4)));
typedef int32_t bits __attribute__((vector_size(4 * V)));

INLINE vec NAME(larger)(vec a, vec b) {
    bits which = a > b;
    return (vec)(((bits)a & which) | ((bits)b & ~which));
}

/* e^x for x <= 0, to about one unit in the last place: 2^n times a polynomial of the rest r, |r| <= ln(2) / 2. Below -87,
   where the result would not be a normal number, e^-87. */
INLINE vec NAME(exponential)(vec x) {
    x = NAME(larger)(x, (vec){0} - 87.0f);
    vec n = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the fraction's lowest bits are the rounded number */
    bits power = (bits)n << 23;
    n -= 12582912.0f;
    vec r = x - n * 0.693359375f;
    r += n * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f; /* Cephes' expf */
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return (vec)((bits)y + power);
}

/* cap * tanh(x / cap), to about cap / 2^24. */
INLINE vec NAME(capped)(vec x, float cap) {
    const vec y = x / cap;
    const bits sign = (bits)y & (int32_t)0x80000000;
    const vec e = NAME(exponential)((vec)((bits)y | (int32_t)0x80000000) * 2.0f);
    return (vec)((bits)((1.0f - e) / (1.0f + e)) | sign) * cap;
}
