/* LLN, block-diagonal and hybrid attention and moment matching on a CPU in float32.

   Each thread computes whole heads, tile by tile. The data of a tile stay in the cache of the thread's core. Only q, k,
   v, the gradient of the output and the results are as long as the sequence, and they are read or written once or
   twice. compile.py compiles this file for one head dimension D, for example -DD=64, and for the CPU of the machine. The
   macros FLOOR, PADDED_QUERY_LIMIT, MIN_SIGMA and LOG_SIGMA2_LIMIT are those of ops/formula.py. */

#include <omp.h>

#include "problem.h"
#include "lln.h"
#include "block_keys.h"
#include "block_diag.h"
#include "joint.h"
#include "global_rows.h"
#include "moments.h"

/* Compute the output of all queries of a head, from the state that sum_keys has stored. */
static void head_answer_queries(const problem *p, int64_t head, scratch c) {
    const int64_t real_keys = p->joint ? count_real_keys(p, head, 0, p->tokens) : 0;
    for (int64_t start = 0; start < p->tokens; start += p->tile_size) {
        const span s = tile_at(p, head, start);
        const float *q = load_queries(&p->q, s, valid_tokens(p, s, c.valid), c.q);
        float *out = output_tile(&p->out, s, c.out);
        if (p->joint) {
            joint_forward(p, head, s, c, q, real_keys, out);
        } else if (p->lln_weight) {
            query_features(s, q, p->alpha[head], log_sum_of_head(p, head), c.features);
            multiply(0, s.rows, D, D, c.features, D, 1, state_of_head(p, head), 1, out, PREFETCH(s, &p->q, &p->out));
        } else {
            memset(out, 0, s.rows * D * sizeof(float));
        }
        if (p->diag_weight && !p->joint) block_forward(p, s, c, q, out);
        store_tile(&p->out, s, out);
    }
}

static void head_forward(const problem *p, int64_t head, scratch c) {
    if (p->calibration.points) head_match_moments(p, head, c); /* this brings q and k into the cache */
    if (p->lln_weight) sum_keys(p, head, c);
    head_answer_queries(p, head, c);
}

/* Compute the gradients of k, v and beta of a head from dS in c.grad_state and g in c.g. Then add the block-diagonal
   part to the gradients of q, k and v. Without an LLN part, all three gradients start from 0; with one,
   queries_backward has already stored the LLN part of the gradient of q. */
static void head_keys_backward(const problem *p, int64_t head, scratch c) {
    if (p->lln_weight) transpose(D, D, c.grad_state, c.state_T);
    clear_global_gradients(p, c);
    double grad_beta = 0;
    for (int64_t start = 0; start < p->tokens; start += p->tile_size) {
        const span s = tile_at(p, head, start);
        const float *valid = valid_tokens(p, s, c.valid);
        const float *k = load_keys(&p->k, s, valid, c.k);
        const float *v = load_keys(&p->v, s, valid, c.v);
        float *grad_k = output_tile(&p->grad_k, s, c.grad_k);
        float *grad_v = output_tile(&p->grad_v, s, c.grad_v);
        if (p->lln_weight) {
            grad_beta += keys_backward(p, head, s, c, 0, log_sum_of_head(p, head), k, v, grad_k, grad_v);
        } else {
            float *grad_q = output_tile(&p->grad_q, s, c.grad_q);
            memset(grad_q, 0, s.rows * D * sizeof(float));
            memset(grad_k, 0, s.rows * D * sizeof(float));
            memset(grad_v, 0, s.rows * D * sizeof(float));
            store_tile(&p->grad_q, s, grad_q);
        }
        if (p->diag_weight && !p->reach) block_backward(p, s, c, grad_k, grad_v);
        store_tile(&p->grad_k, s, grad_k);
        store_tile(&p->grad_v, s, grad_v);
    }
    if (p->reach) window_backward(p, head, c);
    add_global_gradients(p, head, c);
    if (p->grad_beta) p->grad_beta[head] = grad_beta;
}

static void head_backward(const problem *p, int64_t head, scratch c) {
    if (p->joint) {
        joint_backward(p, head, c);
        return;
    }
    if (p->lln_weight) queries_backward(p, head, c);
    head_keys_backward(p, head, c);
}

/* ---- the functions that Python calls ---- */

typedef void head_function(const problem *, int64_t, scratch);

static void for_every_head(const problem *p, head_function *function) {
#pragma omp parallel num_threads(p->threads)
    {
        const scratch c = divide_scratch(p, omp_get_thread_num());
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < p->batches * p->heads; head++) function(p, head, c);
    }
}

typedef void row_function(const problem *, int64_t, int64_t, scratch);

/* Compute the rows of the global queries of all heads, part by part, and then put the parts of each head together. */
static void for_rows(const problem *p, row_function *compute_part, head_function *finish) {
    if (p->global_tokens == NULL) return;
#pragma omp parallel num_threads(p->threads)
    {
        const scratch c = divide_scratch(p, omp_get_thread_num());
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < p->batches * p->heads * p->parts; i++) compute_part(p, i / p->parts, i % p->parts, c);
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < p->batches * p->heads; head++) finish(p, head, c);
    }
}

void forward(const problem *p) {
    for_every_head(p, head_forward);
    for_rows(p, rows_forward, finish_rows_forward);
}

void backward(const problem *p) {
    for_every_head(p, head_backward);
    for_rows(p, rows_backward, finish_rows_backward);
}

void match_moments(const problem *p) { for_every_head(p, head_match_moments); }
