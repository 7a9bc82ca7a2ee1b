//! The largest eigenvalue of a block's Hessian by power iteration: how sharply the loss bends there, which decides how
//! long mixture-of-quantization waits (Shen et al., "Q-BERT", 2020).

use ferrospeed_tensor::random::RandomKey;

/// When power iteration ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerIteration {
    /// Rounds at most.
    pub max_iterations: usize,
    /// Relative change at which it is done.
    pub tolerance: f64,
    /// Added to norms that are divided by.
    pub stability: f64,
}

fn normalize(vector: &mut [f32], stability: f64) {
    let norm = vector.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt() + stability;
    for value in vector {
        let scaled = (f64::from(*value) / norm) as f32;
        *value = if scaled.is_finite() { scaled } else { 0.0 };
    }
}

impl PowerIteration {
    /// The eigenvalue of largest magnitude of the symmetric operator that `product` applies (a Hessian-vector product) to
    /// vectors of `numel` elements. The first vector follows from `key` alone. `seen` is told each round's number, from 1,
    /// and estimate.
    pub fn largest<E>(
        &self,
        numel: usize,
        key: &RandomKey,
        mut product: impl FnMut(&[f32]) -> Result<Vec<f32>, E>,
        mut seen: impl FnMut(usize, f64),
    ) -> Result<f64, E> {
        let mut vector = vec![0.0f32; numel];
        key.fill_normal(0, &mut vector);
        normalize(&mut vector, self.stability);
        let mut eigenvalue = 0.0;
        for round in 1..=self.max_iterations {
            let mut next = product(&vector)?;
            let before = eigenvalue;
            eigenvalue = next.iter().zip(&vector).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
            seen(round, eigenvalue);
            normalize(&mut next, self.stability);
            vector = next;
            if eigenvalue == 0.0 || ((eigenvalue - before) / eigenvalue).abs() < self.tolerance {
                break;
            }
        }
        Ok(eigenvalue)
    }
}

/// Magnitudes relative to the largest. A block whose eigenvalue is exactly zero was not measured and counts as sharpest.
pub fn relative(eigenvalues: &[f64]) -> Vec<f64> {
    let largest = eigenvalues.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    eigenvalues.iter().map(|value| if *value == 0.0 { 1.0 } else { value.abs() / largest }).collect()
}
