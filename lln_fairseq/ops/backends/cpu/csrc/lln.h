/* LLN attention: the formulas of backends/pytorch/lln.py. */

/* a = softmax_d(alpha q + L) */
static void features(span s, const float *q, float alpha, const float *log_sum, float *a) {
    for (int64_t i = 0; i < s.padded; i++, a += D) {
        const float *x = q + i * D;
#pragma omp simd
        for (int d = 0; d < D; d++) a[d] = alpha * x[d] + log_sum[d];
        softmax(D, NULL, a);
    }
}

/* w = exp(beta k - shift), 0 where the key is padded */
static void weights(span s, const float *k, float beta, const float *shift, const float *valid, float *w) {
    for (int64_t j = 0; j < s.padded; j++, w += D) {
        const float *x = k + j * D;
        if (valid && !valid[j]) {
            memset(w, 0, D * sizeof(float));
            continue;
        }
#pragma omp simd
        for (int d = 0; d < D; d++) w[d] = exponential(beta * x[d] - shift[d]);
    }
}

/* total += Σ_j w, summed tile by tile: token by token, a sum of 10^5 loses a digit. */
static void add_weights(span s, const float *w, float *total) {
    float sum[D] = {0};
    for (int64_t j = 0; j < s.padded; j++)
#pragma omp simd
        for (int d = 0; d < D; d++) sum[d] += w[j * D + d];
    for (int d = 0; d < D; d++) total[d] += sum[d];
}

/* Raises `top` to the largest beta k of the tile, and scales what was summed with the old one. */
static void raise_top(span s, const float *k, float beta, const float *valid, float *top, float *total, float *state,
                      float *factor) {
    memcpy(factor, top, D * sizeof(float));
    for (int64_t j = 0; j < s.padded; j++) {
        const float *x = k + j * D;
        if (valid && !valid[j]) continue;
#pragma omp simd
        for (int d = 0; d < D; d++) top[d] = beta * x[d] > top[d] ? beta * x[d] : top[d];
    }
    if (!memcmp(factor, top, D * sizeof(float))) return;
#pragma omp simd
    for (int d = 0; d < D; d++) total[d] *= factor[d] = exponential(factor[d] - top[d]);
    for (int d = 0; d < D; d++)
        for (int e = 0; e < D; e++) state[d * D + e] *= factor[d];
}

/* L = logsumexp_j(beta k_j) and S = weight * W' v, both 0 for a sequence without a real key; with rows for them, the two
   parts of L too: for a joint form, which divides by the second, or for workers that share a sequence. */
static void sum_keys(const problem *p, int64_t head, scratch c) {
    float *log_sum = log_sum_of(p, head), *state = state_of(p, head);
    float *top = c.top, *total = c.total;
    int any = 0;
    memset(state, 0, D * D * sizeof(float));
    for (int d = 0; d < D; d++) top[d] = -1e30f, total[d] = 0;
    for (int64_t start = 0; start < p->tokens; start += p->tile) {
        const span s = tile_of(p, head, start);
        const float *valid = valid_of(p, s, c);
        for (int64_t j = 0; j < s.padded && !any; j++) any = !valid || valid[j];
        const float *k = load_keys(&p->k, s, valid, c.k), *v = load_keys(&p->v, s, valid, c.v);
        raise_top(s, k, p->beta[head], valid, top, total, state, c.factor);
        weights(s, k, p->beta[head], top, valid, c.features);
        add_weights(s, c.features, total);
        multiply(1, D, D, s.padded, c.features, 1, D, v, 1, state, AHEAD(s, &p->k, &p->v));
    }
    for (int d = 0; d < D; d++) {
        const float factor = any ? p->lln / total[d] : 0;
        log_sum[d] = any ? top[d] + logf(total[d]) : 0;
        if (p->rows > D + 1) log_sum[D + d] = any ? top[d] : 0, log_sum[2 * D + d] = any ? total[d] : p->joint != 0;
        for (int e = 0; e < D; e++) state[d * D + e] *= factor;
    }
}

/* dA = do S', dx = A (dA - Σ_d A dA), dq = alpha dx;
   fills dS = A' do and g = diag(S dS') - Σ_i dx_i. */
static void queries_backward(const problem *p, int64_t head, scratch c) {
    float *state = state_of(p, head), *turned = c.turned_state, *dstate = c.dstate, *g = c.g;
    float *a = c.features, *dx = c.slopes;
    const float alpha = p->alpha[head];
    double dalpha = 0;
    transpose(D, D, state, turned);
    memset(dstate, 0, D * D * sizeof(float));
    memset(g, 0, D * sizeof(float));
    for (int64_t start = 0; start < p->tokens; start += p->tile) {
        const span s = tile_of(p, head, start);
        const float *valid = valid_of(p, s, c);
        const float *q = load_queries(&p->q, s, valid, c.q), *grad = load(&p->out, s, NULL, 0, c.grad);
        float *dq = target(&p->dq, s, c.dq);
        features(s, q, alpha, log_sum_of(p, head), a);
        multiply(0, s.padded, D, D, grad, D, 1, turned, 1, dx, AHEAD(s, &p->q, &p->out));
        multiply(1, D, D, s.padded, a, 1, D, grad, 1, dstate, AHEAD(s, &p->dq));
        for (int64_t i = 0; i < s.padded; i++) {
            const float *y = dx + i * D;
            float *to = dq + i * D;
            softmax_backward(D, a + i * D, dx + i * D);
#pragma omp simd
            for (int d = 0; d < D; d++) {
                g[d] -= y[d];
                to[d] = alpha * y[d];
            }
            if (p->dalpha) dalpha += dot(D, q + i * D, y);
        }
        store(&p->dq, s, dq);
    }
    for (int d = 0; d < D; d++) g[d] += dot(D, state + d * D, dstate + d * D);
    if (p->dalpha) p->dalpha[head] = dalpha;
}

/* dv = W dS, dy = W (v dS' - g), dk = beta dy for a tile of keys, or added to what is there; W = e^(beta k - shift).
   Returns Σ k dy, its part of dbeta. */
static inline float keys_backward(const problem *p, int64_t head, span s, scratch c, const int add, const float *shift,
                           const float *k, const float *v, float *dk, float *dv) {
    float *w = c.features, *dy = c.slopes, dbeta = 0;
    const float beta = p->beta[head];
    weights(s, k, beta, shift, valid_of(p, s, c), w);
    multiply(add, s.padded, D, D, w, D, 1, c.dstate, p->lln, dv, AHEAD(s, &p->k, &p->v));
    multiply(0, s.padded, D, D, v, D, 1, c.turned_state, p->lln, dy, AHEAD(s, &p->dk, &p->dv));
    for (int64_t j = 0; j < s.padded; j++) {
        float *y = dy + j * D, *to = dk + j * D;
#pragma omp simd
        for (int d = 0; d < D; d++) {
            y[d] = w[j * D + d] * (y[d] - c.g[d]);
            to[d] = (add ? to[d] : 0) + beta * y[d];
        }
        if (p->dbeta) dbeta += dot(D, k + j * D, y);
    }
    return dbeta;
}
