/* Softmax attention inside a block of tokens, which is a tile here. */

/* 1 or 0 for every weight of a block, from 16 bits each of Philox4x32-10 (Salmon et al., SC 2011). */
static void draw(const problem *p, span s, float *kept) {
    const int64_t words = s.padded * s.padded / 8, head = s.batch * p->heads + s.head;
#pragma omp simd
    for (int64_t i = 0; i < words; i++) {
        uint32_t x[4] = {(uint32_t)i, (uint32_t)s.start, (uint32_t)head, 0};
        uint32_t key[2] = {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)};
        for (int round = 0; round < 10; round++) {
            const uint64_t a = (uint64_t)0xD2511F53u * x[0], b = (uint64_t)0xCD9E8D57u * x[2];
            x[0] = (uint32_t)(b >> 32) ^ x[1] ^ key[0];
            x[2] = (uint32_t)(a >> 32) ^ x[3] ^ key[1];
            x[1] = (uint32_t)b, x[3] = (uint32_t)a;
            key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
        }
        for (int j = 0; j < 4; j++) {
            kept[2 * j * words + i] = (x[j] & 0xFFFF) < p->kept;
            kept[(2 * j + 1) * words + i] = (x[j] >> 16) < p->kept;
        }
    }
}

/* P = softmax(q k' / sqrt(D)) of a block */
static void block_weights(span s, const float *q, const float *k, const float *valid, float *turned, float *weight) {
    const int64_t n = s.padded;
    transpose(n, D, k, turned);
    multiply(0, n, n, D, q, D, 1, turned, 1 / sqrtf(D), weight, NULL);
    for (int64_t i = 0; i < n; i++) softmax(n, valid, weight + i * n);
}

static float diag_weight(const problem *p) { return p->kept ? p->diag * 65536 / p->kept : p->diag; }

/* out += weight * P v */
static void block_forward(const problem *p, span s, scratch c, const float *q, float *out) {
    const float *valid = valid_of(p, s, c);
    const float *k = load_keys(&p->k, s, valid, c.k), *v = load_keys(&p->v, s, valid, c.v);
    float *weight = c.weight, *kept = c.kept;
    block_weights(s, q, k, valid, c.turned, weight);
    if (p->kept) {
        draw(p, s, kept);
        for (int64_t i = 0; i < s.padded * s.padded; i++) weight[i] *= kept[i];
    }
    multiply(1, s.padded, D, s.padded, weight, s.padded, 1, v, diag_weight(p), out, AHEAD(s, &p->k, &p->v));
}

/* dv += P' do, dq += dscores k, dk += dscores' q */
static void block_backward(const problem *p, span s, scratch c, const float *k, const float *v, float *dk, float *dv) {
    const float *valid = valid_of(p, s, c);
    const float *q = load_queries(&p->q, s, valid, c.q), *grad = load(&p->out, s, NULL, 0, c.grad);
    float *dq = load(&p->dq, s, NULL, 0, c.dq);
    const int64_t n = s.padded;
    const float share = diag_weight(p), scale = share / sqrtf(D);
    float *weight = c.weight, *dweight = c.dweight, *kept = c.kept, *turned = c.turned, *dropped = weight;
    block_weights(s, q, k, valid, turned, weight);
    transpose(n, D, v, turned);
    multiply(0, n, n, D, grad, D, 1, turned, 1, dweight, AHEAD(s, &p->q, &p->out));
    if (p->kept) {
        draw(p, s, dropped = kept);
        for (int64_t i = 0; i < n * n; i++) dweight[i] *= kept[i], kept[i] *= weight[i];
    }
    multiply(1, n, D, n, dropped, 1, n, grad, share, dv, AHEAD(s, &p->dq));
    for (int64_t i = 0; i < n; i++) softmax_backward(n, weight + i * n, dweight + i * n);
    multiply(1, n, D, n, dweight, n, 1, k, scale, dq, NULL);
    multiply(1, n, D, n, dweight, 1, n, q, scale, dk, NULL);
    store(&p->dq, s, dq);
}
