/* What block.c puts together, and others call one by one: see where each is defined. */

int afterglow_multiply_3(const float *x, int64_t x_stride, int64_t rows, int64_t inputs, const float *panels, int64_t outputs,
                         const float *bias, int more, float *out, int threads, int width);
int afterglow_multiply_bytes_3(const float *x, int64_t x_stride, int64_t rows, int64_t inputs, const int8_t *panels,
                               int64_t outputs, const float *factors, int more, float *out, int threads);
void afterglow_rms_norm_3(const float *x, int64_t x_row, const float *weight, float eps, float *out, int64_t count, int64_t n,
                          int threads, int width);
void afterglow_gated_silu_3(const float *x, int64_t x_row, float *out, int64_t count, int64_t n, int threads, int width);
