/* Vectors of V floats, and e^x. Included once for each V by files that need them; `vec`, `loose` and `bits` end with the next one. */

#undef vec
#undef loose
#undef bits
#undef load
#undef store
#undef fused
#undef all
#undef from_half
#define vec NAME(vec)
#define loose NAME(loose)
#define bits NAME(bits)
#define load(p) ((vec) * (const loose *)(p))
#define store(p, x) (*(loose *)(p) = (loose)(x))

typedef float vec __attribute__((vector_size(4 * V)));
typedef float loose __attribute__((vector_size(4 * V), aligned(4)));
typedef int32_t bits __attribute__((vector_size(4 * V)));

/* a * b + c, rounded once; a vector of one number; V numbers of half precision. */
#if V == 16
#define fused(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define all(x) ((vec)_mm512_set1_ps(x))
#define from_half(p) ((vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#else
#define fused(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define all(x) ((vec)_mm256_set1_ps(x))
#define from_half(p) ((vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#endif

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
