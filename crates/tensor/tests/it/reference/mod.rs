//! Plain f64 arithmetic for every kernel: slow, obvious, and the truth that the fast code is compared with.

pub(crate) mod check;

/// A row-major array.
#[derive(Debug, Clone)]
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f64>,
}

impl Array {
    pub(crate) fn new(shape: &[usize], data: Vec<f64>) -> Array {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        Array { shape: shape.to_vec(), data }
    }

    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    pub(crate) fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    pub(crate) fn map(&self, f: impl Fn(f64) -> f64) -> Array {
        Array::new(&self.shape, self.data.iter().map(|&x| f(x)).collect())
    }

    /// Element by element, the second operand repeated along the leading dimensions.
    pub(crate) fn zip(&self, other: &Array, f: impl Fn(f64, f64) -> f64) -> Array {
        let n = other.data.len().max(1);
        Array::new(&self.shape, self.data.iter().enumerate().map(|(i, &x)| f(x, other.data[i % n])).collect())
    }

    pub(crate) fn by_row(&self, f: impl Fn(&[f64]) -> Vec<f64>) -> Array {
        let data = self.data.chunks(self.width().max(1)).flat_map(f).collect();
        Array::new(&self.shape, data)
    }
}

/// `a [m, k] · b [k, n]`.
pub(crate) fn matmul(a: &Array, b: &Array) -> Array {
    let (m, k, n) = (a.rows(), a.width(), b.width());
    let mut data = vec![0.0; m * n];
    for i in 0..m {
        for p in 0..k {
            for j in 0..n {
                data[i * n + j] += a.data[i * k + p] * b.data[p * n + j];
            }
        }
    }
    let mut shape = a.shape.clone();
    *shape.last_mut().expect("a matrix") = n;
    Array::new(&shape, data)
}

pub(crate) fn transposed(a: &Array) -> Array {
    let (m, n) = (a.rows(), a.width());
    Array::new(&[n, m], (0..m * n).map(|i| a.data[i % m * n + i / m]).collect())
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// The error function by its power series, which converges for every argument the tests use.
pub(crate) fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    2.0 / std::f64::consts::PI.sqrt() * sum
}

pub(crate) fn gelu_erf(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / 2f64.sqrt()))
}

pub(crate) fn softmax(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return vec![0.0; row.len()];
    }
    let powers: Vec<f64> = row.iter().map(|x| (x - largest).exp()).collect();
    let total: f64 = powers.iter().sum();
    powers.into_iter().map(|p| p / total).collect()
}

pub(crate) fn layer_norm(x: &Array, weight: &Array, bias: &Array, eps: f64) -> Array {
    x.by_row(|row| {
        let count = row.len() as f64;
        let mean = row.iter().sum::<f64>() / count;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        let scale = 1.0 / (variance + eps).sqrt();
        row.iter().enumerate().map(|(i, x)| (x - mean) * scale * weight.data[i] + bias.data[i]).collect()
    })
}

pub(crate) fn rms_norm(x: &Array, weight: &Array, eps: f64) -> Array {
    x.by_row(|row| {
        let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (square + eps).sqrt();
        row.iter().enumerate().map(|(i, x)| x * scale * weight.data[i]).collect()
    })
}

/// Who sees whom in [`attention`].
#[derive(Debug, Clone, Default)]
pub(crate) struct Visibility {
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    /// `[batch, keys]`
    pub(crate) key_mask: Option<Vec<bool>>,
    /// `[heads]`
    pub(crate) alibi: Option<Vec<f64>>,
    /// `[batch, heads, queries, keys]`, added to the scores.
    pub(crate) bias: Option<Vec<f64>>,
}

/// q `[batch, t, heads, d]`, k and v `[batch, s, kv_heads, d]`.
pub(crate) fn attention(q: &Array, k: &Array, v: &Array, rule: &Visibility) -> Array {
    let [batch, queries, heads, dim] = [0, 1, 2, 3].map(|i| q.shape[i]);
    let (keys, kv_heads) = (k.shape[1], k.shape[2]);
    let at = |b: usize, token: usize, head: usize, tokens: usize, heads: usize| {
        ((b * tokens + token) * heads + head) * dim
    };
    let mut out = vec![0.0; q.data.len()];
    for b in 0..batch {
        for head in 0..heads {
            let kv = head / (heads / kv_heads);
            for t in 0..queries {
                let position = t as isize + keys as isize - queries as isize;
                let q_row = at(b, t, head, queries, heads);
                let scores: Vec<f64> = (0..keys)
                    .map(|s| {
                        let hidden = (rule.causal && s as isize > position)
                            || rule.window.is_some_and(|w| (s as isize) <= position - w as isize)
                            || rule.key_mask.as_ref().is_some_and(|mask| !mask[b * keys + s]);
                        if hidden {
                            return f64::NEG_INFINITY;
                        }
                        let k_row = at(b, s, kv, keys, kv_heads);
                        let product: f64 = (0..dim).map(|i| q.data[q_row + i] * k.data[k_row + i]).sum();
                        product / (dim as f64).sqrt()
                            + rule.alibi.as_ref().map_or(0.0, |slopes| slopes[head] * s as f64)
                            + rule
                                .bias
                                .as_ref()
                                .map_or(0.0, |bias| bias[((b * heads + head) * queries + t) * keys + s])
                    })
                    .collect();
                for (s, p) in softmax(&scores).into_iter().enumerate() {
                    let v_row = at(b, s, kv, keys, kv_heads);
                    for i in 0..dim {
                        out[q_row + i] += p * v.data[v_row + i];
                    }
                }
            }
        }
    }
    Array::new(&q.shape, out)
}

/// Mean over the counted rows.
pub(crate) fn cross_entropy(
    logits: &Array,
    targets: &[i64],
    ignore: i64,
    smoothing: f64,
    z_loss: f64,
) -> f64 {
    let classes = logits.width();
    let (mut sum, mut counted) = (0.0, 0);
    for (row, &target) in logits.data.chunks(classes).zip(targets) {
        if target == ignore {
            continue;
        }
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_total = largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln();
        let mean = row.iter().sum::<f64>() / classes as f64;
        sum += log_total - (1.0 - smoothing) * row[target as usize] - smoothing * mean
            + z_loss * log_total * log_total;
        counted += 1;
    }
    sum / f64::from(counted.max(1))
}
