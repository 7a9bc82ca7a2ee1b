use ferrospeed_optim::eigenvalue::{PowerIteration, relative};
use ferrospeed_optim::moq::{BitSchedule, Grid, quantize};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_testkit::golden::golden;

use crate::{flat, number};

#[test]
fn golden_fake_quantised_values_and_bit_schedules() {
    golden().each_case("engine/moq.json", 15, |case| {
        let what = case["id"].to_string();
        let count = |key: &str| case[key].as_u64().unwrap_or_else(|| panic!("{what}: no {key}"));
        if case["kind"] == "values" {
            let grid = if case["type"] == "symmetric" { Grid::Symmetric } else { Grid::Asymmetric };
            let mut values: Vec<f32> = flat(&case["input"]).into_iter().map(|value| value as f32).collect();
            quantize(&mut values, count("bits") as u32, grid, count("groups") as usize)
                .expect("valid numbers");
            for (got, want) in values.iter().zip(flat(&case["expect"])) {
                assert!((f64::from(*got) - want).abs() <= 1e-6 * want.abs(), "{what}: {got} for {want}");
            }
            return;
        }
        let mixing = case["mixed_fp16"].as_bool().expect("a flag").then(|| number(&case["change_ratio"]));
        let (start, target) = (count("start_bits") as u32, count("target_bits") as u32);
        let schedule = BitSchedule::new(start, target, count("period"), mixing);
        let trace = case["trace"].as_array().expect("a list");
        if trace.iter().any(|entry| entry.is_object()) {
            assert!(schedule.is_err(), "{what}");
            return;
        }
        let mut schedule = schedule.expect("it starts above its target");
        // The recorded factor is one more than four times the eigenvalue, rounded down.
        let eigenvalue = (count("factor") > 1).then(|| (count("factor") - 1) as f64 / 4.0);
        for (step, entry) in trace.iter().enumerate() {
            schedule.step(eigenvalue);
            let want = flat(entry);
            let got = (f64::from(schedule.bits), schedule.period as f64);
            assert_eq!(got, (want[0], want[1]), "{what}, step {step}");
            assert!((schedule.ratio - want[2]).abs() < 1e-9, "{what}, step {step}: {}", schedule.ratio);
        }
    });
}

#[test]
fn golden_block_eigenvalues() {
    golden().each_case("engine/eigenvalue.json", 5, |case| {
        let what = case["id"].to_string();
        if case["kind"] == "post_process" {
            assert_eq!(relative(&flat(&case["input"])), flat(&case["expect"]), "{what}");
            return;
        }
        let iteration = PowerIteration {
            max_iterations: case["max_iter"].as_u64().expect("a count") as usize,
            tolerance: number(&case["tol"]),
            stability: number(&case["stability"]),
        };
        let blocks = case["hessians"].as_array().expect("a list");
        let found: Vec<f64> = blocks
            .iter()
            .enumerate()
            .map(|(block, hessian)| {
                let rows: Vec<Vec<f64>> = hessian.as_array().expect("rows").iter().map(flat).collect();
                let product = |v: &[f32]| -> Result<Vec<f32>, std::convert::Infallible> {
                    let dot = |row: &Vec<f64>| row.iter().zip(v).map(|(h, &v)| h * f64::from(v)).sum::<f64>();
                    Ok(rows.iter().map(|row| dot(row) as f32).collect())
                };
                let key = RandomKey::new(1, block as u32);
                iteration.largest(rows.len(), &key, product, |_, _| ()).unwrap_or_else(|never| match never {})
            })
            .collect();
        let tolerance = number(&case["compare_rtol"]);
        for (got, want) in relative(&found).into_iter().zip(flat(&case["expect_postprocessed"])) {
            assert!((got - want).abs() <= tolerance * want, "{what}: {got} for {want}");
        }
    });
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let mut values = [1.0, -2.0, 0.5];
    assert!(quantize(&mut values, 0, Grid::Symmetric, 1).is_err());
    assert!(quantize(&mut values, 2, Grid::Asymmetric, 1).is_err());
    assert!(quantize(&mut values, 8, Grid::Symmetric, 2).is_err());
    assert_eq!(values, [1.0, -2.0, 0.5]);
    quantize(&mut [], 8, Grid::Symmetric, 1).expect("nothing to do");
    let mut zeros = [0.0; 4];
    quantize(&mut zeros, 4, Grid::Symmetric, 2).expect("valid");
    quantize(&mut zeros, 4, Grid::Asymmetric, 2).expect("valid");
    assert_eq!(zeros, [0.0; 4]);
}
