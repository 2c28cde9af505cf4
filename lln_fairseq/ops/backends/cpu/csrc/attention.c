/* LLN and block-diagonal attention and moment matching on a CPU in float32.

   A thread takes whole heads. What belongs to a tile of tokens stays in the cache of its core: q, k, v, the gradient
   and the results are read and written once or twice, and nothing else of their size exists. Compiled by compile.py
   for one head dimension (-DD=64) and for the CPU at hand. */

#include <omp.h>

#include "problem.h"
#include "lln.h"
#include "block_diag.h"
#include "joint.h"
#include "moments.h"

static void head_answer_queries(const problem *p, int64_t head, scratch c) {
    const int64_t keys = p->joint ? real_keys(p, head, 0, p->tokens) : 0;
    for (int64_t start = 0; start < p->tokens; start += p->tile) {
        const span s = tile_of(p, head, start);
        const float *q = load_queries(&p->q, s, valid_of(p, s, c), c.q);
        float *out = target(&p->out, s, c.out);
        if (p->joint) {
            joint_forward(p, head, s, c, q, keys, out);
        } else if (p->lln) {
            features(s, q, p->alpha[head], log_sum_of(p, head), c.features);
            multiply(0, s.padded, D, D, c.features, D, 1, state_of(p, head), 1, out, AHEAD(s, &p->q, &p->out));
        } else {
            memset(out, 0, s.padded * D * sizeof(float));
        }
        if (p->diag && !p->joint) block_forward(p, s, c, q, out);
        store(&p->out, s, out);
    }
}

static void head_forward(const problem *p, int64_t head, scratch c) {
    if (p->calibration.points) head_match_moments(p, head, c); /* q and k are in the cache then */
    if (p->lln) sum_keys(p, head, c);
    head_answer_queries(p, head, c);
}

static void head_keys_backward(const problem *p, int64_t head, scratch c) {
    if (p->lln) transpose(D, D, c.dstate, c.turned_state);
    double dbeta = 0;
    for (int64_t start = 0; start < p->tokens; start += p->tile) {
        const span s = tile_of(p, head, start);
        const float *valid = valid_of(p, s, c);
        const float *k = load_keys(&p->k, s, valid, c.k), *v = load_keys(&p->v, s, valid, c.v);
        float *dk = target(&p->dk, s, c.dk), *dv = target(&p->dv, s, c.dv);
        if (p->lln) {
            dbeta += keys_backward(p, head, s, c, 0, log_sum_of(p, head), k, v, dk, dv);
        } else {
            float *results[] = {target(&p->dq, s, c.dq), dk, dv};
            for (int i = 0; i < 3; i++) memset(results[i], 0, s.padded * D * sizeof(float));
            store(&p->dq, s, results[0]);
        }
        if (p->diag) block_backward(p, s, c, k, v, dk, dv);
        store(&p->dk, s, dk), store(&p->dv, s, dv);
    }
    if (p->dbeta) p->dbeta[head] = dbeta;
}

static void head_backward(const problem *p, int64_t head, scratch c) {
    if (p->joint) {
        joint_backward(p, head, c);
        return;
    }
    if (p->lln) queries_backward(p, head, c);
    head_keys_backward(p, head, c);
}

/* The halves of backward: between them workers that share a sequence add up dS and g. */
static void first_half(const problem *p, int64_t head, scratch c) {
    float *shared = p->shared + head * (D + 1) * D;
    queries_backward(p, head, c);
    memcpy(shared, c.dstate, D * D * sizeof(float));
    memcpy(shared + D * D, c.g, D * sizeof(float));
}

static void second_half(const problem *p, int64_t head, scratch c) {
    const float *shared = p->shared + head * (D + 1) * D;
    memcpy(c.dstate, shared, D * D * sizeof(float));
    memcpy(c.g, shared + D * D, D * sizeof(float));
    head_keys_backward(p, head, c);
}

/* ---- what Python calls ---- */

typedef void head_function(const problem *, int64_t, scratch);

static void every_head(const problem *p, head_function *function) {
#pragma omp parallel num_threads(p->threads)
    {
        const scratch c = carve(p, omp_get_thread_num());
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < p->batches * p->heads; head++) function(p, head, c);
    }
}

void forward(const problem *p) { every_head(p, head_forward); }
void backward(const problem *p) { every_head(p, head_backward); }
void forward_keys(const problem *p) { every_head(p, sum_keys); }
void forward_queries(const problem *p) { every_head(p, head_answer_queries); }
void backward_queries(const problem *p) { every_head(p, first_half); }
void backward_keys(const problem *p) { every_head(p, second_half); }
void match_moments(const problem *p) { every_head(p, head_match_moments); }
