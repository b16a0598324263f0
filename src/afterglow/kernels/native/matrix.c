/* Products of rows with a matrix, float32: as fast as memory is read for a dozen rows, and as fast as can be multiplied beyond.

   The matrix is kept in panels of as many outputs as two vectors have lanes, inputs one after another, so that a panel is read
   in one run, and a tile of rows by a panel stays in registers. Each number is summed up in the same order whatever
   other rows there are: a row's product does not depend on its batch.

   Built and called as segments.c is. */

#include "team.h"

#define AHEAD 1024  /* floats of a panel that are asked for ahead of time (8 rows of 768 inputs: 0.48 to 0.35 ms) */
#define RUN 512     /* inputs that are added up before they join the sum so far: errors stay small */
#define CHUNK 240   /* rows that pass a panel before the next one's turn: they stay in the third cache */
#define NO_WAKE 65536 /* to wake a thread takes about as long as so many products */
#define MAX_ROWS 12

/* out[row][0 .. 2 V) = bias + x[row] . panel, or added to what `out` holds, for `rows` rows, `x_stride` and `out_stride` floats apart. */
typedef void tile(const float *x, int64_t x_stride, const float *panel, int64_t inputs, const float *bias, int add, float *out,
                  int64_t out_stride, int64_t rows);

TARGET(AVX512)
#define V 16
#include "vectors.h"
#include "panel.h"
END_TARGET

TARGET(AVX2)
#define V 8
#include "vectors.h"
#include "panel.h"
END_TARGET

/* Rows from `x` on that pass the panels together. */
typedef struct {
    tile *multiply_tile;
    const float *x;
    int64_t x_stride, rows, tile_rows;
    const afterglow_matrix *matrix;
    int64_t lanes;
    int add;
    float *out, *copy; /* `copy`: the rows `copy_stride` floats apart, or null */
    int64_t copy_stride;
} product;

static void copy_rows(const void *what, int64_t from, int64_t to, int worker) {
    const product *job = what;
    (void)worker;
    for (int64_t row = from; row < to; row++)
        memcpy(job->copy + row * job->copy_stride, job->x + row * job->x_stride, job->matrix->inputs * sizeof *job->x);
}

static void multiply_panels(const void *what, int64_t from, int64_t to, int worker) {
    const product job = *(const product *)what;
    const afterglow_matrix matrix = *job.matrix;
    const float *x = job.copy ? job.copy : job.x;
    const int64_t stride = job.copy ? job.copy_stride : job.x_stride, lanes = job.lanes;
    (void)worker;
    for (int64_t i = from; i < to; i++) {
        const float *panel = (const float *)matrix.panels + i * matrix.inputs * lanes;
        const float *bias = matrix.terms ? matrix.terms + i * lanes : 0;
        const int64_t left = matrix.outputs - i * lanes;
        for (int64_t row = 0; row < job.rows; row += job.tile_rows) {
            const int64_t rows = job.rows - row < job.tile_rows ? job.rows - row : job.tile_rows;
            float *out = job.out + row * matrix.outputs + i * lanes, edge[MAX_ROWS * 2 * 16];
            if (left >= lanes) {
                job.multiply_tile(x + row * stride, stride, panel, matrix.inputs, bias, job.add, out, matrix.outputs, rows);
                continue;
            }
            for (int64_t j = 0; job.add && j < rows; j++) memcpy(edge + j * lanes, out + j * matrix.outputs, left * sizeof *out);
            job.multiply_tile(x + row * stride, stride, panel, matrix.inputs, bias, job.add, edge, lanes, rows);
            for (int64_t j = 0; j < rows; j++) memcpy(out + j * matrix.outputs, edge + j * lanes, left * sizeof *out);
        }
    }
}

int afterglow_multiply(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add, float *out, int threads,
                       int width) {
    const int64_t most = width == 16 ? MAX_ROWS : MAX_ROWS / 2, lanes = 2 * width, count = (matrix->outputs + lanes - 1) / lanes;
    const int wake = count * lanes * matrix->inputs * (1 + rows / most) >= NO_WAKE;
    product job = {.multiply_tile = width == 16 ? multiply_tile_16 : multiply_tile_8, .x_stride = x_stride, .matrix = matrix};
    job.add = add, job.lanes = lanes, job.copy_stride = matrix->inputs + width;
    /* Rows a multiple of 4 KiB apart would all fall into the same few places of the first cache. */
    if (rows > 1 && x_stride % 1024 == 0) {
        job.copy = malloc((rows < CHUNK ? rows : CHUNK) * job.copy_stride * sizeof *job.copy);
        if (!job.copy) return 1;
    }
    for (int64_t first = 0; first < rows; first += CHUNK) {
        job.x = x + first * x_stride, job.out = out + first * matrix->outputs;
        job.rows = rows - first < CHUNK ? rows - first : CHUNK;
        const int64_t tiles = (job.rows + most - 1) / most;
        job.tile_rows = (job.rows + tiles - 1) / tiles;
        if (job.copy) team_share(copy_rows, &job, job.rows, 16, threads, wake);
        team_share(multiply_panels, &job, count, 1 + count / (16 * threads), threads, wake);
    }
    free(job.copy);
    return 0;
}
