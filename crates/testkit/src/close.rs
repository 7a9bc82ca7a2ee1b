//! Float comparison with the operands in the message.

/// Asserts `|actual - expected| <= absolute + relative * |expected|` for every element; NaN equals only NaN.
///
/// # Panics
/// With the first and the worst difference, when one is larger.
#[track_caller]
pub fn assert_close(what: &str, actual: &[f32], expected: &[f32], absolute: f32, relative: f32) {
    assert_eq!(actual.len(), expected.len(), "{what}: lengths differ");
    let mut worst: Option<(usize, f32)> = None;
    let mut wrong = 0;
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        if (a.is_nan() && e.is_nan()) || a == e {
            continue;
        }
        let excess = (a - e).abs() - (absolute + relative * e.abs());
        if excess <= 0.0 {
            continue;
        }
        wrong += 1;
        if worst.is_none_or(|(_, seen)| excess.is_nan() || excess > seen) {
            worst = Some((index, excess));
        }
    }
    if let Some((index, _)) = worst {
        panic!(
            "{what}: {wrong} of {} elements differ; worst at {index}: got {}, expected {} (tolerance {absolute} + {relative} relative)",
            actual.len(),
            actual[index],
            expected[index]
        );
    }
}
