use std::collections::BTreeSet;

use ferrospeed_optim::Gradient;
use ferrospeed_optim::norm::{Magnitude, SquareSum};
use ferrospeed_tensor::backend::Clipping;
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

use super::{flat, number, report};

/// Where we differ, by what a case does.
const NO_NORM_NO_CLIPPING: &str =
    "gradients without a norm are left alone instead of being multiplied by -1 or NaN";
const LARGE_SQUARES: &str =
    "finite gradients have a norm and no overflow, even where a float32 sum of theirs overflows";
const MARKER_IS_NO_NUMBER: &str =
    "a part without a norm leaves the whole without one (DeepSpeed squares its marker -1)";

fn close(what: &str, got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-6 * want.abs(), "{what}: got {got}, expected {want}");
}

fn floats(value: &Value) -> Vec<f32> {
    flat(value).into_iter().map(|value| value as f32).collect()
}

/// The norm of several gradients taken as one vector, as ranks take it together; infinite where one is no number.
fn norm(gradients: &[Vec<f32>]) -> f64 {
    let device = ferrospeed_cpu::device();
    let seen = || gradients.iter().map(|gradient| Gradient::F32(gradient));
    let whole = seen().fold(Magnitude::ZERO, |most, one| most.max(Magnitude::of(one, &device)));
    let sums = seen().map(|one| SquareSum::of(one, whole, &device));
    sums.fold(SquareSum::default(), |sum, one| sum + one).norm(whole)
}

#[test]
fn golden_norms_and_clipped_gradients() {
    let mut met = BTreeSet::new();
    // Gradients are clipped by their 2-norm alone.
    golden().each_case_of(
        "utils/norms.json",
        9,
        |case| number(&case["norm_type"]) == 2.0,
        |case| {
            let what = case["id"].to_string();
            let grads: Vec<Vec<f32>> = case["grads"].as_array().expect("a list").iter().map(floats).collect();
            let expect = &case["expect"];
            let found = norm(&grads);
            if !grads.iter().flatten().all(|value| value.is_finite()) {
                met.insert(NO_NORM_NO_CLIPPING);
                assert_eq!(found, f64::INFINITY, "{what}");
                return;
            }
            if number(&expect["get_grad_norm"]) == -1.0 {
                met.insert(LARGE_SQUARES);
                let largest = grads.iter().flatten().fold(0f64, |most, &v| most.max(f64::from(v).abs()));
                assert!(found >= largest && found.is_finite(), "{what}: {found}");
                return;
            }
            for helper in ["get_grad_norm", "get_weight_norm", "get_global_norm_of_tensors"] {
                close(&format!("{what} {helper}"), found, number(&expect[helper]));
            }
            let limit = Some(number(&case["max_norm"]));
            let factor = Clipping { loss_scale: 1.0, limit }.factor(found);
            for helper in ["clip_grad_norm_", "clip_gradients", "clip_tensors_by_global_norm"] {
                let recorded = &expect[helper];
                if recorded.is_null() {
                    continue;
                }
                let total =
                    if helper == "clip_grad_norm_" { &recorded["total_norm"] } else { &recorded["norm"] };
                close(&format!("{what} {helper}"), found, number(total));
                let clipped = grads.iter().flatten().map(|&value| f64::from(value * factor));
                for (got, want) in clipped.zip(flat(&recorded["clipped"])) {
                    close(&format!("{what} {helper} clipped"), got, want);
                }
            }
        },
    );
    report("golden_norms_and_clipped_gradients", &met);
}

#[test]
fn golden_small_tensor_helpers() {
    let mut met = BTreeSet::new();
    let ours = |case: &Value| matches!(case["fn"].as_str(), Some("get_global_norm" | "overflow_check_sum"));
    golden().each_case_of("utils/misc.json", 11, ours, |case| {
        let (what, args) = (case["id"].to_string(), &case["args"]);
        if case["fn"] == "get_global_norm" {
            // The norm of the whole is that of the parts' norms.
            let parts = floats(&args["norm_list"]);
            match parts.iter().any(|norm| *norm < 0.0) {
                true => drop(met.insert(MARKER_IS_NO_NUMBER)),
                false => close(&what, norm(&[parts]), number(&case["expect"])),
            }
            return;
        }
        let values = floats(&args["values"]);
        let found = !Magnitude::of(Gradient::F32(&values), &ferrospeed_cpu::device()).is_finite();
        let sum: f32 = values.iter().sum();
        if values.iter().all(|value| value.is_finite()) && !sum.is_finite() {
            met.insert(LARGE_SQUARES);
            assert!(!found, "{what}");
        } else {
            assert_eq!(Some(found), case["expect"].as_bool(), "{what}");
        }
    });
    report("golden_small_tensor_helpers", &met);
}
