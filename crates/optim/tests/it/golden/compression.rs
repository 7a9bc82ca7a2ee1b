use ferrospeed_optim::compression::{BitSchedule, Mask, Units};
use ferrospeed_tensor::Tensor;
use ferrospeed_tensor::fake_quantize::{FakeQuantizer, Levels};
use ferrospeed_testkit::cases::Cases;
use ferrospeed_testkit::golden::golden;
use ferrospeed_testkit::tensors::{self, Recorded};
use serde_json::Value;

use super::flat;

fn quantized(quantizer: FakeQuantizer, values: &[f32]) -> Vec<f32> {
    let x = Tensor::from_slice(values, [values.len()], &ferrospeed_cpu::with_threads(1)).unwrap();
    quantizer.apply(&x).unwrap().to_vec::<f32>().unwrap()
}

fn assert_equal(what: &str, found: &[f32], expected: &[f32]) {
    // Sums of magnitudes are taken in another order; even levels are the same to the last bit.
    ferrospeed_testkit::close::assert_close(what, found, expected, 0.0, 1e-6);
}

fn schedule(case: &Value, period: &str) -> BitSchedule {
    let mixed = case["mixed_fp16"] == true;
    BitSchedule {
        start_bits: case["start_bits"].as_u64().unwrap(),
        target_bits: case["target_bits"].as_u64().unwrap(),
        period: case[period].as_u64().unwrap(),
        factor: case["factor"].as_u64().unwrap_or(1),
        change_ratio: mixed.then(|| case["change_ratio"].as_f64().unwrap()),
    }
}

/// Recorded shares are rounded to a few digits.
fn assert_share(what: &str, found: f64, expected: &Value) {
    let expected = expected.as_f64().unwrap();
    assert!((found - expected).abs() < 1e-6, "{what}: {found}, not {expected}");
}

#[test]
fn golden_bits_and_values_of_moq() {
    golden().each_case("engine/moq.json", 15, |case| {
        let what = case["id"].as_str().unwrap();
        if case["kind"] == "values" {
            let symmetric = case["type"] == "symmetric";
            let levels = Levels::of(case["bits"].as_u64().unwrap(), symmetric).unwrap();
            let groups = case["groups"].as_u64().unwrap() as usize;
            let narrow = |values: &Value| flat(values).into_iter().map(|v| v as f32).collect::<Vec<_>>();
            let found = quantized(FakeQuantizer::new(levels, groups), &narrow(&case["input"]));
            assert_equal(what, &found, &narrow(&case["expect"]));
            return;
        }
        let schedule = schedule(case, "period");
        for (step, want) in (1..).zip(case["trace"].as_array().unwrap()) {
            if want["type"] == "AssertionError" {
                assert!(schedule.flaw(true).unwrap().contains("bits only become fewer"), "{what}");
                return;
            }
            let found = schedule.at(step);
            assert_eq!(
                [found.bits, found.period],
                [&want[0], &want[1]].map(|n| n.as_u64().unwrap()),
                "{what}"
            );
            assert_share(what, found.exact_share, &want[2]);
        }
    });
}

#[test]
fn golden_steps_of_moq() {
    let Some(path) = golden().path("quantization/moq_schedule.json") else { return };
    let recorded = recorded_tensors();
    let weight = recorded["weight"].floats();
    let mut cases = Cases::of("quantization/moq_schedule.json");
    for case in ferrospeed_testkit::golden::read_json(&path).as_array().unwrap() {
        let schedule = schedule(case, "quantization_period");
        for row in case["rows"].as_array().unwrap() {
            let step = row[0].as_u64().unwrap();
            cases.check(format!("{schedule:?}, step {step}"), || {
                let found = schedule.at(step);
                assert_eq!([found.bits, found.period], [&row[1], &row[2]].map(|n| n.as_u64().unwrap()));
                assert_share("exact share", found.exact_share, &row[3]);
                let mut quantizer = FakeQuantizer::new(Levels::of(found.bits, true).unwrap(), 1);
                quantizer.exact_share =
                    if schedule.change_ratio.is_some() { found.exact_share as f32 } else { 0.0 };
                let sum: f64 = quantized(quantizer, weight).into_iter().map(f64::from).sum();
                let expected = row[4].as_f64().unwrap();
                assert!((sum - expected).abs() < 1e-5, "the sum is {sum}, not {expected}");
            });
        }
    }
    cases.finish(&golden(), 117);
}

fn recorded_tensors() -> std::collections::BTreeMap<String, Recorded> {
    let path = golden().path("quantization/quant.safetensors");
    path.map(|path| tensors::read(&path)).unwrap_or_default()
}

/// The number behind a letter in a name such as `sym.b8.g2`.
fn number(name: &str, letter: char) -> Option<&str> {
    name.split_once(&format!(".{letter}"))?.1.split(".g").next()
}

#[test]
fn golden_levels_and_masks() {
    let recorded = recorded_tensors();
    let Some(weight) = recorded.get("weight") else { return };
    let (weight, shape) = (weight.floats(), weight.shape.clone());
    let mut cases = Cases::of("quantization/quant.safetensors");
    let (rows, width) = (shape[0], shape[1]);
    for (name, expected) in recorded.iter().filter(|(name, _)| *name != "weight" && !name.starts_with("woq."))
    {
        cases.check(name, || {
            let (kind, _) = name.split_once('.').unwrap();
            let expected = expected.floats();
            if kind.ends_with("_mask") {
                let ratio: f64 = name.split_once(".r").unwrap().1.parse().unwrap();
                let units = match kind {
                    "topk_mask" => Units { stride: 1, count: weight.len() },
                    "row_mask" => Units { stride: width, count: rows },
                    other => panic!("no mask is called {other}"),
                };
                let mask = Mask::of_largest(&units.scores(weight), ratio);
                let found: Vec<f32> =
                    (0..units.count).map(|unit| f32::from(u8::from(mask.keeps(unit)))).collect();
                assert_eq!(found, expected);
                return;
            }
            let groups = name.split_once(".g").map_or(1, |(_, groups)| groups.parse().unwrap());
            let bits = || number(name, 'b').unwrap().parse().unwrap();
            let levels = match kind {
                "sym" | "sym_static" => Levels::of(bits(), true),
                "asym" | "asym_static" => Levels::of(bits(), false),
                "ternary" => Ok(Levels::Ternary),
                "binary" => Ok(Levels::Binary),
                other => panic!("no quantiser is called {other}"),
            };
            let mut quantizer = FakeQuantizer::new(levels.unwrap(), groups);
            // The range that the recording's README names.
            quantizer.range = kind.ends_with("_static").then_some([-1.0, 1.5]);
            assert_equal(name, &quantized(quantizer, weight), expected);
        });
    }
    cases.finish(&golden(), 21);
}
