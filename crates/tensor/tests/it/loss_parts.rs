//! The loss over parts of the classes against the loss of all of them, on every device that is there.

use ferrospeed_tensor::backend::{ClassPart, CrossEntropyOptions, LossGradient};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, Device, Tensor};

use super::devices::devices;

const IGNORED: i64 = -100;

/// Rows of logits and what each should predict.
struct Case {
    logits: Vec<f32>,
    targets: Vec<i64>,
    classes: usize,
}

impl Case {
    fn normal(rows: usize, classes: usize, dtype: DType) -> Case {
        let mut logits = vec![0.0f32; rows * classes];
        RandomKey::new(7, classes as u32).fill_normal(0, &mut logits);
        // What the type holds, so that all see the same numbers.
        let cpu = ferrospeed_cpu::with_threads(1);
        let held = Tensor::from_f32(&logits, [rows, classes], dtype, &cpu).unwrap();
        let target = |r: usize| if r % 4 == 3 { IGNORED } else { (r * 7 % classes) as i64 };
        Case { logits: held.to_vec_f32().unwrap(), targets: (0..rows).map(target).collect(), classes }
    }

    fn rows(&self) -> usize {
        self.targets.len()
    }

    /// Columns `first..behind` of all rows.
    fn columns(&self, first: usize, behind: usize) -> Vec<f32> {
        self.logits.chunks(self.classes).flat_map(|row| row[first..behind].to_vec()).collect()
    }

    /// Losses and gradients by one kernel over all classes.
    fn whole(&self) -> [Vec<f32>; 2] {
        let device = ferrospeed_cpu::with_threads(1);
        let mut logits = Tensor::from_slice(&self.logits, [self.rows(), self.classes], &device).unwrap();
        let targets = Tensor::from_slice(&self.targets, [self.rows()], &device).unwrap();
        let mut losses = Tensor::empty([self.rows()], DType::F32, &device).unwrap();
        let options = CrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
        device
            .backend()
            .cross_entropy_rows(
                &options,
                logits.out().unwrap(),
                self.classes,
                &targets,
                losses.out().unwrap(),
                LossGradient::OverLogits,
            )
            .unwrap();
        [losses, logits].map(|tensor| tensor.to_vec_f32().unwrap())
    }

    /// The same by parts that begin at `cuts`, gradients in `dtype`; every part's losses must be the same bits.
    fn by_parts(&self, cuts: &[usize], dtype: DType, device: &Device) -> [Vec<f32>; 2] {
        let backend = device.backend();
        let held = backend.logits_dtype(dtype);
        let targets = Tensor::from_slice(&self.targets, [self.rows()], device).unwrap();
        let end = |number: usize| cuts.get(number + 1).copied().unwrap_or(self.classes);
        let mut told = Vec::new();
        let mut parts: Vec<(ClassPart, Tensor)> = Vec::new();
        for (number, &first) in cuts.iter().enumerate() {
            let part = ClassPart { ignore_index: IGNORED, number, first, all: self.classes };
            let shape = [self.rows(), end(number) - first];
            let mut logits =
                Tensor::from_f32(&self.columns(first, end(number)), shape, held, device).unwrap();
            let mut own = Tensor::empty([self.rows(), ClassPart::NUMBERS], DType::F32, device).unwrap();
            let out = own.out().unwrap();
            backend.cross_entropy_part(&part, logits.out().unwrap(), &targets, out).unwrap();
            told.extend(own.to_vec_f32().unwrap());
            parts.push((part, logits));
        }
        let told = Tensor::from_slice(&told, [cuts.len(), self.rows(), ClassPart::NUMBERS], device).unwrap();
        let mut all_losses: Option<Vec<f32>> = None;
        let mut gradients = vec![0.0; self.logits.len()];
        for (part, mut logits) in parts {
            let width = logits.shape().last();
            let mut losses = Tensor::empty([self.rows()], DType::F32, device).unwrap();
            let mut narrow = Tensor::empty(*logits.shape(), dtype, device).unwrap();
            let gradient = match held == dtype {
                true => LossGradient::OverLogits,
                false => LossGradient::Into(narrow.out().unwrap()),
            };
            let (out, lost) = (logits.out().unwrap(), losses.out().unwrap());
            backend.cross_entropy_of_parts(&part, &told, out, &targets, lost, gradient).unwrap();
            let losses = losses.to_vec_f32().unwrap();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            let before = all_losses.get_or_insert_with(|| losses.clone());
            assert_eq!(bits(before), bits(&losses), "part {} of {cuts:?} has other losses", part.number);
            let own = if held == dtype { logits } else { narrow }.to_vec_f32().unwrap();
            for (r, row) in own.chunks(width.max(1)).enumerate() {
                gradients[r * self.classes + part.first..][..width].copy_from_slice(row);
            }
        }
        [all_losses.unwrap(), gradients]
    }
}

fn assert_near(found: &[f32], wanted: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(wanted).enumerate() {
        let near = (a - b).abs() <= tolerance * b.abs().max(1.0) || a == b || (a.is_nan() && b.is_nan());
        assert!(near, "{what}: element {i} is {a}, not {b}");
    }
}

/// Of one element, or of a gradient, which is at most one.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-6,
        DType::BF16 => 4e-3,
        _ => 5e-4,
    }
}

#[test]
fn parts_give_the_loss_and_the_gradient_of_the_whole() {
    for device in devices() {
        for (classes, cuts) in [
            (2, vec![0, 1]),
            (33, vec![0, 16]),
            (1000, vec![0, 333, 667]),
            (4104, vec![0, 2052]),
            (4105, vec![0, 1, 8, 9, 4104]),
            (40, vec![0, 0, 40]),
            (50_257, vec![0, 25_128]),
        ] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let case = Case::normal(9, classes, dtype);
                let [losses, gradients] = case.by_parts(&cuts, dtype, &device);
                let [whole_losses, whole_gradients] = case.whole();
                let what =
                    format!("{dtype} {classes} classes cut at {cuts:?} on {}", device.backend().name());
                assert_near(&losses, &whole_losses, 2e-6, &format!("losses, {what}"));
                assert_near(&gradients, &whole_gradients, tolerance(dtype), &format!("gradients, {what}"));
            }
        }
    }
}

#[test]
fn logits_that_are_no_numbers_or_huge_do_what_they_do_to_the_whole_loss() {
    const CLASSES: usize = 24;
    const MINUS: f32 = f32::NEG_INFINITY;
    fn normal(i: usize) -> f32 {
        (i * 5 % 7) as f32 / 3.0
    }
    // The logits of a row, and its target.
    let rows: Vec<(fn(usize) -> f32, i64)> = vec![
        // A part without any finite logit: the target in the other, and in that one.
        (|i| if i < 12 { MINUS } else { normal(i) }, 20),
        (|i| if i < 12 { normal(i) } else { MINUS }, 3),
        (|i| if i < 12 { MINUS } else { normal(i) }, 3),
        (|_| MINUS, 5),
        (|i| if i == 7 { f32::NAN } else { normal(i) }, 20),
        (|i| if i == 19 { f32::INFINITY } else { normal(i) }, 3),
        (|i| if i == 2 { 3e38 } else { -3e38 }, 2),
        (|i| if i == 2 { 3e38 } else { -3e38 }, 14),
        (|_| -3e38, 14),
        (|i| 1e4 + normal(i), 9),
        // What does not count is not looked at.
        (|_| f32::NAN, IGNORED),
    ];
    let case = Case {
        logits: rows.iter().flat_map(|(logit, _)| (0..CLASSES).map(*logit)).collect(),
        targets: rows.iter().map(|(_, target)| *target).collect(),
        classes: CLASSES,
    };
    let [whole_losses, whole_gradients] = case.whole();
    assert!(whole_losses[3].is_nan() && whole_losses[4].is_nan() && whole_losses[5].is_nan());
    assert!(whole_losses[0].is_finite() && whole_losses[2] == f32::INFINITY);
    for device in devices() {
        for cuts in [vec![0, 12], vec![0, 3, 12, 13]] {
            let [losses, gradients] = case.by_parts(&cuts, DType::F32, &device);
            let what = format!("cut at {cuts:?} on {}", device.backend().name());
            // Next to ten thousand, f32 has steps of a thousandth.
            assert_near(&losses, &whole_losses, 2e-3, &format!("losses, {what}"));
            assert_near(&gradients, &whole_gradients, 2e-6, &format!("gradients, {what}"));
        }
    }
}

#[test]
fn a_target_in_no_part_is_an_error() {
    for device in devices() {
        for bad in [24, -1] {
            let mut case = Case::normal(2, 24, DType::F32);
            case.targets = vec![3, bad];
            let part = ClassPart { ignore_index: IGNORED, number: 0, first: 0, all: 24 };
            let mut logits = Tensor::from_slice(&case.columns(0, 12), [2, 12], &device).unwrap();
            let targets = Tensor::from_slice(&case.targets, [2], &device).unwrap();
            let mut told = Tensor::empty([2, ClassPart::NUMBERS], DType::F32, &device).unwrap();
            let (logits, out) = (logits.out().unwrap(), told.out().unwrap());
            let done = device.backend().cross_entropy_part(&part, logits, &targets, out);
            // A GPU says so when something is read.
            let error = done.and_then(|()| told.to_vec_f32()).unwrap_err().to_string();
            assert!(error.contains(&format!("index {bad} at position 1 is outside 0..24")), "{error}");
        }
    }
}
