/* The joint form of LLN+Diag: the formulas of ops/joint.py and backends/pytorch/joint.py. A block is a tile. */

static const float FLOOR = 0.0625f; /* of ops/joint.py */

/* The maximum t and the sum Σ_j e^(beta k_j - t) of the keys, the two parts of L, behind it. */
static float *top_of(const problem *p, int64_t head) { return log_sum_of(p, head) + D; }
static float *total_of(const problem *p, int64_t head) { return log_sum_of(p, head) + 2 * D; }

static int64_t real_keys(const problem *p, int64_t head, int64_t start, int64_t count) {
    if (p->padding == NULL) return count;
    const uint8_t *padding = p->padding + head / p->heads * p->tokens + start;
    int64_t real = 0;
    for (int64_t j = 0; j < count; j++) real += !padding[j];
    return real;
}

/* What the queries of a block multiply the outside by. */
typedef struct {
    int all, none; /* whether all real keys of the sequence are in the block, or none of them */
    float odds;    /* e^-o */
} rule;

static rule rule_of(const problem *p, int64_t head, span s, int64_t keys) {
    const int64_t inside = real_keys(p, head, s.start, s.count);
    return (rule){inside == keys && inside, !inside, expf(-p->parameter[head])};
}

typedef struct {
    float weight, by_u, by_parameter; /* c and its derivatives */
} outside;

static inline outside outside_of(rule r, float u) {
    if (r.all) return (outside){0, 0, 0};
    if (r.none) return (outside){1, 0, 0};
    const float divisor = u + (1 - u) * r.odds;
    const int floored = !(divisor > FLOOR);
    const float unit = 1 / (floored ? FLOOR : divisor);
    return (outside){unit, floored ? 0 : -unit * unit * (1 - r.odds), floored ? 0 : unit * (1 - unit * u)};
}

/* u, from the mass inside the block; rounding must not leave [0, 1] */
static inline float outside_mass(float inside) { return inside < 0 ? 1 : inside > 1 ? 0 : 1 - inside; }

static inline float sum(int64_t n, const float *x) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += x[i];
    return total;
}

/* w (D, n), transposed, to the bits that S was made of: e^(beta k - L) would differ by what rounding does to a large L.
   From the transposed keys, in their place. */
static void turned_weights(const problem *p, int64_t head, span s, const float *valid, float *turned) {
    const float beta = p->beta[head], *top = top_of(p, head), *total = total_of(p, head);
    for (int d = 0; d < D; d++) {
        const float shift = top[d], inverse = 1 / total[d];
        float *w = turned + d * s.padded;
#pragma omp simd
        for (int64_t j = 0; j < s.padded; j++) w[j] = exponential(beta * w[j] - shift) * inverse;
        if (valid == NULL) continue;
#pragma omp simd
        for (int64_t j = 0; j < s.padded; j++) w[j] *= valid[j];
    }
}

static inline void scale_row(int64_t n, float factor, float *x) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

static void joint_forward(const problem *p, int64_t head, span s, scratch c, const float *q, int64_t keys, float *out) {
    const float *valid = valid_of(p, s, c);
    const float *k = load_keys(&p->k, s, valid, c.k), *v = load_keys(&p->v, s, valid, c.v);
    const int64_t n = s.padded;
    const rule r = rule_of(p, head, s, keys);
    const float rescale = diag_weight(p);
    float *a = c.features, *weight = c.weight, *inside = c.inside;
    block_weights(s, q, k, valid, c.turned, weight);
    turned_weights(p, head, s, valid, c.turned);
    features(s, q, p->alpha[head], log_sum_of(p, head), a);
    multiply(0, n, n, D, a, D, 1, c.turned, 1, inside, NULL);
    if (p->kept) {
        draw(p, s, c.kept);
        for (int64_t i = 0; i < n * n; i++) weight[i] *= c.kept[i];
    }
    for (int64_t i = 0; i < n; i++) {
        float *w = weight + i * n, *m = inside + i * n;
        const float u = outside_mass(sum(n, m)), outer = outside_of(r, u).weight, inner = (1 - outer * u) * rescale;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) w[j] = inner * w[j] - outer * m[j];
        scale_row(D, outer, a + i * D);
    }
    multiply(0, n, D, D, a, D, 1, state_of(p, head), 1, out, AHEAD(s, &p->q, &p->out));
    multiply(1, n, D, n, weight, n, 1, v, 1, out, AHEAD(s, &p->k, &p->v));
}

/* One query's row of the block, from w = the softmax, e = do v', m = M: w becomes the gradient of the scores, e X and
   m what multiplies do in dv; da = do S' becomes c da, and weight is c. Returns its part of the parameter's gradient. */
static inline __attribute__((always_inline)) float joint_row(
    rule r, int64_t n, const int dropout, const float *kept, float rescale, const float *a, float *da, float *w,
    float *e, float *m, float *weight) {
    float diag = 0, mass = 0, outer = 0;
#pragma omp simd reduction(+ : diag, mass, outer)
    for (int64_t j = 0; j < n; j++) {
        diag += dropout ? rescale * kept[j] * w[j] * e[j] : w[j] * e[j];
        mass += m[j];
        outer -= m[j] * e[j];
    }
    outer += dot(D, a, da);
    const float u = outside_mass(mass);
    const outside o = outside_of(r, u);
    const float inner = 1 - o.weight * u, du = o.by_u * outer - (o.weight + o.by_u * u) * diag;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const float share = dropout ? inner * rescale * kept[j] : inner, p = w[j], slope = e[j];
        m[j] = share * p - o.weight * m[j];
        w[j] = p * (share * slope - inner * diag);
        e[j] = -(o.weight * slope + du);
    }
    scale_row(D, *weight = o.weight, da);
    return o.by_parameter * (outer - u * diag);
}

/* dx = A (dA - δ), dq = alpha dx, A becomes c A; adds Σ_i A δ to g and returns Σ q dx. */
static float joint_queries(span s, const float *q, float alpha, const float *weight, float *a, const float *dx,
                           float *dq, float *g) {
    float dalpha[D] = {0}, total[D] = {0};
    for (int64_t i = 0; i < s.padded; i++, a += D, dx += D) {
        const float delta = dot(D, a, dx), *x = q + i * D;
        float *to = dq + i * D;
#pragma omp simd
        for (int d = 0; d < D; d++) {
            const float slope = a[d] * (dx[d] - delta);
            total[d] += a[d] * delta;
            dalpha[d] += x[d] * slope;
            to[d] = alpha * slope;
            a[d] *= weight[i];
        }
    }
    for (int d = 0; d < D; d++) g[d] += total[d];
    return sum(D, dalpha);
}

/* dk = beta W dW in place of dW; returns Σ k W dW. */
static float joint_keys(int64_t n, const float *k, const float *w, float beta, float *dk) {
    float dbeta = 0;
#pragma omp simd reduction(+ : dbeta)
    for (int64_t j = 0; j < n; j++) {
        const float y = w[j] * dk[j];
        dbeta += k[j] * y;
        dk[j] = beta * y;
    }
    return dbeta;
}

typedef struct {
    double alpha, beta, parameter;
} slopes;

/* What a tile adds to dS, g and the slopes; its dq, and the block's part of its dk and dv. */
static void joint_block_backward(const problem *p, int64_t head, span s, scratch c, int64_t keys, slopes *sums) {
    const float *valid = valid_of(p, s, c);
    const float *k = load_keys(&p->k, s, valid, c.k), *v = load_keys(&p->v, s, valid, c.v);
    const float *q = load_queries(&p->q, s, valid, c.q), *grad = load(&p->out, s, NULL, 0, c.grad);
    float *dq = target(&p->dq, s, c.dq), *dk = target(&p->dk, s, c.dk), *dv = target(&p->dv, s, c.dv);
    const int64_t n = s.padded;
    const float beta = p->beta[head], rescale = diag_weight(p), scale = 1 / sqrtf(D);
    const rule r = rule_of(p, head, s, keys);
    float *a = c.features, *w = c.out, *dx = c.slopes, *weight = c.weight, *x = c.dweight, *inside = c.inside;

    block_weights(s, q, k, valid, c.turned, weight);
    turned_weights(p, head, s, valid, c.turned);
    transpose(D, n, c.turned, w);
    features(s, q, p->alpha[head], log_sum_of(p, head), a);
    multiply(0, n, n, D, a, D, 1, c.turned, 1, inside, AHEAD(s, &p->dk, &p->dv));
    transpose(n, D, v, c.turned);
    multiply(0, n, n, D, grad, D, 1, c.turned, 1, x, AHEAD(s, &p->k, &p->v));
    multiply(0, n, D, D, grad, D, 1, c.turned_state, 1, dx, AHEAD(s, &p->q, &p->out));
    if (p->kept) draw(p, s, c.kept);
#define ROWS_OF_BLOCK(dropout)                                                                                      \
    for (int64_t i = 0; i < n; i++)                                                                                 \
        sums->parameter += joint_row(r, n, dropout, c.kept + i * n, rescale, a + i * D, dx + i * D, weight + i * n, \
                                     x + i * n, inside + i * n, c.outer + i);
    if (p->kept) { ROWS_OF_BLOCK(1) } else { ROWS_OF_BLOCK(0) }

    multiply(1, n, D, n, x, n, 1, w, 1, dx, AHEAD(s, &p->dq));
    multiply(0, n, D, n, inside, 1, n, grad, 1, dv, NULL);
    multiply(0, n, D, n, x, 1, n, a, 1, dk, NULL);
    sums->beta += joint_keys(n * D, k, w, beta, dk);
    sums->alpha += joint_queries(s, q, p->alpha[head], c.outer, a, dx, dq, c.g);
    multiply(1, D, D, n, a, 1, D, grad, 1, c.dstate, NULL);
    multiply(1, n, D, n, weight, n, 1, k, scale, dq, NULL);
    multiply(1, n, D, n, weight, 1, n, q, scale, dk, NULL);
    store(&p->dq, s, dq), store(&p->dk, s, dk), store(&p->dv, s, dv);
}

static void joint_backward(const problem *p, int64_t head, scratch c) {
    const int64_t keys = real_keys(p, head, 0, p->tokens);
    slopes sums = {0};
    transpose(D, D, state_of(p, head), c.turned_state);
    memset(c.dstate, 0, D * D * sizeof(float));
    memset(c.g, 0, D * sizeof(float));
    for (int64_t start = 0; start < p->tokens; start += p->tile)
        joint_block_backward(p, head, tile_of(p, head, start), c, keys, &sums);

    /* W as it went into S is e^(beta k - t) / Σ: the sum moves to the other factor. */
    const float *total = total_of(p, head);
    for (int d = 0; d < D; d++) {
        scale_row(D, 1 / total[d], c.dstate + d * D);
        c.g[d] /= total[d];
    }
    transpose(D, D, c.dstate, c.turned_state);
    for (int64_t start = 0; start < p->tokens; start += p->tile) {
        const span s = tile_of(p, head, start);
        const float *valid = valid_of(p, s, c);
        const float *k = load_keys(&p->k, s, valid, c.k), *v = load_keys(&p->v, s, valid, c.v);
        float *dk = load(&p->dk, s, NULL, 0, c.dk), *dv = load(&p->dv, s, NULL, 0, c.dv);
        sums.beta += keys_backward(p, head, s, c, 1, top_of(p, head), k, v, dk, dv);
        store(&p->dk, s, dk), store(&p->dv, s, dv);
    }
    if (p->dalpha) p->dalpha[head] = sums.alpha;
    if (p->dbeta) p->dbeta[head] = sums.beta;
    if (p->dparameter) p->dparameter[head] = sums.parameter;
}
