//! What a few measurements say about a machine: by which factors its rates are other than expected, and how sure that is.
//!
//! A step is taken to be made of parts whose seconds are known at the expected rates ([`Parts`]). Each rate is off by a factor
//! of its own, unknown but not absurd; measured steps then say which factors are likely. The likeliest ones are found by
//! Gauss and Newton's method on the logarithms, damped as Levenberg and Marquardt do, and the curvature there says how far
//! a prediction may be off.

/// What a step is made of, in seconds at the expected rates.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Parts {
    /// Arithmetic, with all cores busy.
    pub compute_s: f64,
    /// What it takes longer because micro-batches are small.
    pub idle_s: f64,
    /// Forward and backward through memory.
    pub passes_s: f64,
    /// The update.
    pub update_s: f64,
    /// Between ranks.
    pub wire_s: f64,
    /// From and to the host and the disk.
    pub offload_s: f64,
    /// How often ranks wait for each other.
    pub exchanges: f64,
}

/// Arithmetic, idle cores, memory, wire, offload, the price of an exchange, and all of them together.
const FACTORS: usize = 7;
/// How far each factor may well be off, as a logarithm.
const SPREAD: [f64; FACTORS] = [0.8, 1.2, 0.8, 0.8, 0.8, 2.0, 0.2];
/// What an exchange is expected to cost besides its bytes.
const EXCHANGE_S: f64 = 30e-6;
/// How far measured steps lie beside the best factors: what parts do not say.
const UNEXPLAINED: f64 = 0.05;
const ITERATIONS: usize = 40;

type Vector = [f64; FACTORS];
type Matrix = [Vector; FACTORS];

/// A machine, as it is believed to be.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    /// Logarithms of factors.
    logs: Vector,
    /// The inverse of the curvature: what is not known about them.
    covariance: Matrix,
}

/// The logarithm of a step's seconds, and how far it may be off.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prediction {
    pub(super) log_s: f64,
    pub(super) deviation: f64,
}

impl Machine {
    /// The likeliest after so many measured steps: their parts and the logarithms of their seconds.
    pub(super) fn after(steps: &[(Parts, f64)]) -> Machine {
        let mut logs = [0.0; FACTORS];
        let mut damping = 1e-3;
        let mut error = badness(&logs, steps);
        for _ in 0..ITERATIONS {
            let (mut curvature, slope) = around(&logs, steps);
            for (place, row) in curvature.iter_mut().enumerate() {
                row[place] *= 1.0 + damping;
            }
            let Some(inverse) = inverse(curvature) else { break };
            let mut next = logs;
            for (value, row) in next.iter_mut().zip(&inverse) {
                *value += product(row, &slope);
            }
            let found = badness(&next, steps);
            if found < error {
                let gained = error - found;
                (logs, error, damping) = (next, found, damping / 4.0);
                if gained < 1e-9 {
                    break;
                }
            } else {
                damping *= 8.0;
            }
        }
        let (curvature, _) = around(&logs, steps);
        Machine { logs, covariance: inverse(curvature).unwrap_or([[0.0; FACTORS]; FACTORS]) }
    }

    pub(super) fn predict(&self, parts: &Parts) -> Prediction {
        let slope = slope_of(&self.logs, parts);
        let spread = self.covariance.iter().zip(&slope).map(|(row, one)| one * product(row, &slope));
        let variance = spread.sum::<f64>().max(0.0) + UNEXPLAINED * UNEXPLAINED;
        Prediction { log_s: log_seconds(&self.logs, parts), deviation: variance.sqrt() }
    }
}

/// What a step is expected to take by each factor; the last has all of it.
fn seconds(logs: &Vector, parts: &Parts) -> Vector {
    let [compute, idle, memory, wire, offload, exchange, all] = logs.map(f64::exp);
    let (busy_s, idle_s, passes_s) =
        (parts.compute_s * compute, parts.idle_s * idle, parts.passes_s * memory);
    // Arithmetic runs beside the passes over memory.
    let (busy_s, idle_s, passes_s) =
        if busy_s + idle_s >= passes_s { (busy_s, idle_s, 0.0) } else { (0.0, 0.0, passes_s) };
    let mut by = [
        busy_s,
        idle_s,
        passes_s + parts.update_s * memory,
        parts.wire_s * wire,
        parts.offload_s * offload,
        parts.exchanges * EXCHANGE_S * exchange,
        0.0,
    ];
    by.iter_mut().for_each(|seconds| *seconds *= all);
    by[FACTORS - 1] = by.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    by
}

fn log_seconds(logs: &Vector, parts: &Parts) -> f64 {
    seconds(logs, parts)[FACTORS - 1].ln()
}

/// How a step's logarithm follows each factor's: by that factor's share of it.
fn slope_of(logs: &Vector, parts: &Parts) -> Vector {
    let by = seconds(logs, parts);
    by.map(|part| part / by[FACTORS - 1])
}

/// How unlikely factors are, after so many measured steps.
fn badness(logs: &Vector, steps: &[(Parts, f64)]) -> f64 {
    let square = |off: f64, by: f64| (off / by).powi(2);
    let unlike: f64 = logs.iter().zip(SPREAD).map(|(log, spread)| square(*log, spread)).sum();
    let off = |(parts, seen): &(Parts, f64)| square(log_seconds(logs, parts) - seen, UNEXPLAINED);
    unlike + steps.iter().map(off).sum::<f64>()
}

/// The curvature of half the badness, and the way down.
fn around(logs: &Vector, steps: &[(Parts, f64)]) -> (Matrix, Vector) {
    let (mut curvature, mut down) = ([[0.0; FACTORS]; FACTORS], [0.0; FACTORS]);
    for place in 0..FACTORS {
        let certainty = SPREAD[place].powi(-2);
        curvature[place][place] = certainty;
        down[place] = -certainty * logs[place];
    }
    for (parts, seen) in steps {
        let (slope, off) = (slope_of(logs, parts), seen - log_seconds(logs, parts));
        let certainty = UNEXPLAINED.powi(-2);
        for one in 0..FACTORS {
            down[one] += certainty * slope[one] * off;
            for other in 0..FACTORS {
                curvature[one][other] += certainty * slope[one] * slope[other];
            }
        }
    }
    (curvature, down)
}

fn product(one: &Vector, other: &Vector) -> f64 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

/// By elimination; the matrix is symmetric and positive, so that no rows need to change places.
fn inverse(mut matrix: Matrix) -> Option<Matrix> {
    let mut inverse = [[0.0; FACTORS]; FACTORS];
    for (place, row) in inverse.iter_mut().enumerate() {
        row[place] = 1.0;
    }
    for pivot in 0..FACTORS {
        let scale = matrix[pivot][pivot];
        if scale.is_nan() || scale <= 0.0 {
            return None;
        }
        for column in 0..FACTORS {
            matrix[pivot][column] /= scale;
            inverse[pivot][column] /= scale;
        }
        for row in (0..FACTORS).filter(|row| *row != pivot) {
            let factor = matrix[row][pivot];
            for column in 0..FACTORS {
                matrix[row][column] -= factor * matrix[pivot][column];
                inverse[row][column] -= factor * inverse[pivot][column];
            }
        }
    }
    Some(inverse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_show_a_rate_teach_it_and_others_stay_uncertain() {
        let parts = |compute_s: f64, wire_s: f64| Parts { compute_s, wire_s, ..Parts::default() };
        // The wire is four times as slow as expected.
        let seen = |parts: Parts| (parts, (parts.compute_s + 4.0 * parts.wire_s).ln());
        let machine = Machine::after(&[seen(parts(1.0, 0.1)), seen(parts(1.0, 1.0)), seen(parts(0.2, 1.0))]);
        let found = machine.predict(&parts(0.5, 0.5));
        assert!((found.log_s - 2.5f64.ln()).abs() < 0.05, "{found:?}");
        let unknown = machine.predict(&Parts { offload_s: 1.0, ..Parts::default() });
        assert!(unknown.deviation > 4.0 * found.deviation, "{unknown:?} {found:?}");
    }
}
