use std::collections::BTreeSet;

use ferrospeed_optim::Gradient;
use ferrospeed_optim::clip::{NormType, clip, combine, has_inf_or_nan, norm, zeros};
use ferrospeed_tensor::Device;
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

use crate::{flat, number, report};

/// Where we differ, by what a case does.
const SQUARES_FOR_EVERY_DEGREE: &str = "clip_grad_norm_ adds p-th powers, not squares, for every degree p";
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

#[test]
fn golden_norms_and_clipped_gradients() {
    let (device, mut met) = (Device::cpu(), BTreeSet::new());
    golden().each_case("utils/norms.json", 13, |case| {
        let what = case["id"].to_string();
        let norm_type = NormType::new(number(&case["norm_type"])).expect("recorded degrees are valid");
        let max_norm = number(&case["max_norm"]);
        let grads: Vec<Vec<f32>> = case["grads"].as_array().expect("a list").iter().map(floats).collect();
        let seen: Vec<Gradient<'_>> = grads.iter().map(|grad| Gradient::F32(grad)).collect();
        let expect = &case["expect"];
        assert_eq!(zeros(&seen) as f64, number(&expect["get_grad_zeros"]), "{what}");
        let finite = grads.iter().flatten().all(|value| value.is_finite());
        let found = norm(&seen, norm_type, &device);
        let mut clipped = grads.clone();
        let mut views: Vec<&mut [f32]> = clipped.iter_mut().map(Vec::as_mut_slice).collect();
        let outcome = clip(&mut views, max_norm, norm_type, &device);
        if !finite {
            met.insert(NO_NORM_NO_CLIPPING);
            assert_eq!(found, None, "{what}");
            assert!(outcome.is_err(), "{what}");
            let bits = |grads: &[Vec<f32>]| grads.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&clipped), bits(&grads), "{what}");
            return;
        }
        let found = found.unwrap_or_else(|| panic!("{what}: no norm"));
        assert_eq!(outcome.expect("finite gradients"), found, "{what}");
        if number(&expect["get_grad_norm"]) == -1.0 {
            met.insert(LARGE_SQUARES);
            let largest = grads.iter().flatten().fold(0f64, |most, &v| most.max(f64::from(v).abs()));
            assert!(found >= largest && found.is_finite(), "{what}: {found}");
            return;
        }
        for helper in ["get_grad_norm", "get_weight_norm", "get_global_norm_of_tensors"] {
            close(&format!("{what} {helper}"), found, number(&expect[helper]));
        }
        for helper in ["clip_grad_norm_", "clip_gradients", "clip_tensors_by_global_norm"] {
            let recorded = &expect[helper];
            if recorded.is_null() {
                continue;
            }
            let squares = matches!(norm_type, NormType::P(_)) && helper == "clip_grad_norm_";
            if squares {
                met.insert(SQUARES_FOR_EVERY_DEGREE);
                continue;
            }
            let total = if helper == "clip_grad_norm_" { &recorded["total_norm"] } else { &recorded["norm"] };
            close(&format!("{what} {helper}"), found, number(total));
            let values = clipped.iter().flatten().map(|&v| f64::from(v));
            for (got, want) in values.zip(flat(&recorded["clipped"])) {
                close(&format!("{what} {helper} clipped"), got, want);
            }
        }
    });
    report("golden_norms_and_clipped_gradients", &met);
}

#[test]
fn golden_small_tensor_helpers() {
    let (device, mut met, mut skipped) = (Device::cpu(), BTreeSet::new(), BTreeSet::new());
    golden().each_case("utils/misc.json", 63, |case| {
        let (what, args) = (case["id"].to_string(), &case["args"]);
        match case["fn"].as_str().expect("a name") {
            "get_global_norm" => {
                let parts: Vec<Option<f64>> =
                    flat(&args["norm_list"]).into_iter().map(|norm| (norm >= 0.0).then_some(norm)).collect();
                match combine(&parts, NormType::Two) {
                    Some(norm) => close(&what, norm, number(&case["expect"])),
                    None => {
                        met.insert(MARKER_IS_NO_NUMBER);
                        assert!(parts.contains(&None), "{what}");
                    }
                }
            }
            "overflow_check_sum" => {
                let values = floats(&args["values"]);
                let found = has_inf_or_nan(Gradient::F32(&values), &device);
                let sum: f32 = values.iter().sum();
                if values.iter().all(|value| value.is_finite()) && !sum.is_finite() {
                    met.insert(LARGE_SQUARES);
                    assert!(!found, "{what}");
                } else {
                    assert_eq!(Some(found), case["expect"].as_bool(), "{what}");
                }
            }
            other => {
                skipped.insert(other.to_owned());
            }
        }
    });
    skipped.iter().for_each(|helper| eprintln!("golden: utils/misc.json: {helper} belongs to another crate"));
    report("golden_small_tensor_helpers", &met);
}
