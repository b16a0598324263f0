/* Shared by block.c and experts.c. */

#pragma once
#include "team.h"

#define CHUNK 240 /* rows, as in matrix.c */

/* Writes out [rows][outputs] = x times a matrix of any kind, or adds to it. Returns 1 if there was no memory. */
__attribute__((visibility("hidden"))) int multiply_any(const afterglow_matrix *matrix, const float *x, int64_t x_stride, int64_t rows, int add,
                                                       float *out, int threads, int width);

/* Adds to out [rows][hidden] what the experts of each row of x, of the same shape, compute. Returns 1 if there was no memory. */
__attribute__((visibility("hidden"))) int add_experts(const afterglow_experts *experts, const float *x, float *out, int64_t rows, int threads,
                                                      int width);
