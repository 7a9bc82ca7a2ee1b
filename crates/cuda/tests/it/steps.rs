//! A GPU's memory, optimizer steps and copies beside other work, against the processor's.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use super::on_gpu::{device, normal};
use ferrospeed_tensor::backend::{Clipping, Update, UpdateOperands, sum_of_words};
use ferrospeed_tensor::beside::{Beside, Moment};
use ferrospeed_tensor::{Category, DType, Out, Tensor, ops};

#[test]
fn memory_is_counted_and_running_out_is_an_error() {
    let Some(gpu) = device() else { return };
    let before = gpu.memory_usage().current(Category::Gradients);
    let tensor = Tensor::zeros_in([1000], DType::F32, &gpu, Category::Gradients).unwrap();
    assert_eq!(gpu.memory_usage().current(Category::Gradients) - before, 4096);
    drop(tensor);
    assert_eq!(gpu.memory_usage().current(Category::Gradients), before);
    let error = Tensor::empty([1usize << 50], DType::F32, &gpu).unwrap_err().to_string();
    assert!(error.contains("cannot allocate") && error.contains("bytes free"), "{error}");
    assert!(Tensor::zeros([10], DType::F32, &gpu).is_ok(), "the device goes on");
}

#[test]
fn optimizer_steps_and_exact_norms() {
    let Some(gpu) = device() else { return };
    let adam = Update::Adam {
        decoupled: true,
        betas: [0.9, 0.99],
        rest: [0.1, 0.01],
        eps: 1e-8,
        decay: 0.01,
        step_size: 0.1,
        inverse_root_correction: 1.2,
    };
    // Pieces of one step: whole chunks, less than one, and some that start where no pack does.
    let counts = [1, 77, 4096, 0, 100_003, 32_768];
    let total: usize = counts.iter().sum();
    let (w, g) = (normal(&[total], 1), normal(&[total], 2));
    let weights = Tensor::from_slice(&w, [total], &gpu).unwrap();
    let gradient = Tensor::from_f32(&g, [total], DType::BF16, &gpu).unwrap();
    let rounded = gradient.to_vec_f32().unwrap();
    let states = [0, 1].map(|_| Tensor::zeros([total], DType::F32, &gpu).unwrap());
    let copy = Tensor::zeros([total], DType::BF16, &gpu).unwrap();
    let mut start = 0;
    let pieces = counts.map(|count| {
        let cut = |flat: &Tensor| flat.slice(start, [count]).unwrap();
        let piece = UpdateOperands {
            weights: cut(&weights),
            gradient: cut(&gradient),
            states: states.iter().map(cut).collect(),
            copy: Some(cut(&copy)),
        };
        start += count;
        piece
    });
    gpu.backend().update(&adam, 0.5, &pieces).unwrap();
    let new = weights.to_vec::<f32>().unwrap();
    for i in 0..total {
        let g = f64::from(rounded[i]) * 0.5;
        let (m, v) = (0.1 * g, 0.01 * g * g);
        let truth = f64::from(w[i]) * 0.99 - 0.1 * m / (v.sqrt() * 1.2 + 1e-8);
        assert!((f64::from(new[i]) - truth).abs() < 1e-5, "element {i}: {} against {truth}", new[i]);
    }
    let expected: Vec<f32> = new.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
    assert_eq!(copy.to_vec_f32().unwrap(), expected);

    let gradients: Vec<&Tensor> = pieces.iter().map(|piece| &piece.gradient).collect();
    let largest = rounded.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    assert_eq!(gpu.backend().largest_magnitude(&gradients).unwrap(), largest);
    let grid = 2f64.powi(40);
    let square = |&v: &f32| (f64::from(v) * f64::from(v) * grid).round_ties_even() as i64;
    let sum: i128 = rounded.iter().map(|v| i128::from(square(v))).sum();
    assert_eq!(gpu.backend().sum_of_squares(&gradients, grid).unwrap(), sum);
    // Piece by piece, on two grids at once.
    let mut measures = Tensor::zeros([5], DType::I64, &gpu).unwrap();
    for piece in &gradients {
        gpu.backend().measure_more(&[piece], &[grid, grid / 16.0], measures.out().unwrap()).unwrap();
    }
    let words: Vec<u64> = measures.to_vec::<i64>().unwrap().into_iter().map(i64::cast_unsigned).collect();
    assert_eq!(f32::from_bits(words[0] as u32), largest);
    assert_eq!(sum_of_words([words[1], words[2]]), sum);
    let coarse = gpu.backend().sum_of_squares(&gradients, grid / 16.0).unwrap();
    assert_eq!(sum_of_words([words[3], words[4]]), coarse);
    let bad = Tensor::from_slice(&[1.0f32, f32::NAN, 2.0], [3], &gpu).unwrap();
    assert!(!gpu.backend().largest_magnitude(&[&bad]).unwrap().is_finite());
}

#[test]
fn a_step_left_to_the_device_is_the_one_with_the_host_in_between() {
    let Some(gpu) = device() else { return };
    let backend = gpu.backend();
    let sgd = Update::Sgd { lr: 0.1, decay: 0.01, momentum: 0.0, entering: 1.0, nesterov: false };
    let count = 70_001;
    let weights = || Tensor::from_f32(&normal(&[count], 1), [count], DType::F32, &gpu).unwrap();
    for (scale, limit) in [(1.0, Some(1.0)), (1.0, None), (1024.0, Some(1e9)), (3.0e-30, Some(0.5))] {
        let values: Vec<f32> = normal(&[count], 2).into_iter().map(|v| v * scale as f32).collect();
        let gradient = Tensor::from_f32(&values, [count], DType::BF16, &gpu).unwrap();
        let operands = |weights: &Tensor| UpdateOperands {
            weights: weights.clone(),
            gradient: gradient.clone(),
            states: Vec::new(),
            copy: None,
        };
        let clipping = Clipping { loss_scale: scale, limit };
        let (left, apart) = (weights(), weights());
        let updates = [(sgd, vec![operands(&left)])];
        let measured = backend.clipped_updates(clipping, &[&gradient], &updates).unwrap().unwrap();
        assert_eq!(measured.largest, backend.largest_magnitude(&[&gradient]).unwrap());
        let grid = 2f64.powi(50 - 2 * f64::from(measured.largest).log2().floor() as i32);
        assert_eq!(measured.squares, backend.sum_of_squares(&[&gradient], grid).unwrap());
        let factor = clipping.factor((measured.squares as f64 / grid).sqrt());
        backend.update(&sgd, factor, &[operands(&apart)]).unwrap();
        assert_eq!(left.to_vec::<f32>().unwrap(), apart.to_vec::<f32>().unwrap(), "{clipping:?}");
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0f32; count];
        values[count - 7] = bad;
        let gradient = Tensor::from_slice(&values, [count], &gpu).unwrap();
        let left = weights();
        let operands = UpdateOperands {
            weights: left.clone(),
            gradient: gradient.clone(),
            states: Vec::new(),
            copy: None,
        };
        let clipping = Clipping { loss_scale: 1.0, limit: None };
        let measured =
            backend.clipped_updates(clipping, &[&gradient], &[(sgd, vec![operands])]).unwrap().unwrap();
        assert!(!measured.largest.is_finite());
        assert_eq!(left.to_vec::<f32>().unwrap(), weights().to_vec::<f32>().unwrap(), "nothing was updated");
    }
}

#[test]
fn copies_of_every_size_arrive_whole_beside_other_work() {
    let Some(gpu) = device() else { return };
    let piece = 8 << 20;
    let sizes = [0, 1, 4096, (64 << 10) + 1, piece - 1, piece, piece + 1, 3 * piece + 5, 40_000_003];
    let busy = Tensor::full([2048, 2048], 0.01, DType::F32, &gpu).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (gpu, busy) = (&gpu, &busy);
            scope.spawn(move || {
                for size in sizes {
                    let values: Vec<u8> = (0..size as u64)
                        .map(|i| (i.wrapping_mul(2_654_435_761 + thread) >> 13) as u8)
                        .collect();
                    let tensor = Tensor::from_slice(&values, [size], gpu).unwrap();
                    drop(ops::matmul(busy, busy).unwrap());
                    // A read that was begun sees what was there, whatever comes after it.
                    let one = Tensor::full([1], size as f32, DType::F32, gpu).unwrap();
                    let begun = one.item_later().unwrap();
                    gpu.backend().fill(Out::of_device(&one).unwrap(), -1.0).unwrap();
                    assert!(tensor.to_vec::<u8>().unwrap() == values, "{size} bytes");
                    assert_eq!(begun().unwrap(), size as f32);
                }
            });
        }
    });
    assert!(
        ferrospeed_cpu::device().memory_usage().current(Category::Buffers) >= 2 * piece,
        "buffers are counted on the host"
    );
}

#[test]
fn copies_beside_other_work_wait_for_their_moment_and_for_nothing_later() {
    let Some(gpu) = device() else { return };
    let numel = 3_000_001;
    let tensor = Tensor::full([numel], 0.0, DType::F32, &gpu).unwrap();
    let busy = Tensor::full([4096, 4096], 0.01, DType::F32, &gpu).unwrap();
    let room = gpu.locked(numel, DType::F32, Category::Buffers).unwrap();
    // SAFETY: no copy is under way when the host fills the room, and nobody looks at it before a copy has ended.
    let fill =
        |room: &Tensor, value| ferrospeed_cpu::device().backend().fill(unsafe { Out::vouched(room) }, value);
    // SAFETY: as above.
    let begin = |from: &Tensor, to: &Tensor, now: &Moment| unsafe { Beside::begin(from, to, now) };
    for round in 1..4 {
        // What is written behind a heap of work is what the copy finds.
        (0..8).for_each(|_| drop(ops::matmul(&busy, &busy).unwrap()));
        gpu.backend().fill(Out::of_device(&tensor).unwrap(), round as f32).unwrap();
        let now = Moment::now(&gpu).unwrap().unwrap();
        let out = begin(&tensor, &room, &now).unwrap();
        (0..8).for_each(|_| drop(ops::matmul(&busy, &busy).unwrap()));
        out.wait().unwrap();
        assert!(room.to_vec::<f32>().unwrap().iter().all(|&value| value == round as f32));
        // And back.
        fill(&room, -(round as f32)).unwrap();
        begin(&room, &tensor, &now).unwrap().wait().unwrap();
        assert!(tensor.to_vec::<f32>().unwrap().iter().all(|&value| value == -(round as f32)));
        // The device waits where the host does not.
        fill(&room, 0.5).unwrap();
        let now = Moment::now(&gpu).unwrap().unwrap();
        begin(&room, &tensor, &now).unwrap().follow().unwrap();
        assert!(tensor.to_vec::<f32>().unwrap().iter().all(|&value| value == 0.5));
    }
    let short = gpu.locked(numel - 1, DType::F32, Category::Buffers).unwrap();
    let now = Moment::now(&gpu).unwrap().unwrap();
    let refused = begin(&tensor, &short, &now).err().unwrap().to_string();
    assert!(refused.contains("differ in size"), "{refused}");
    let refused = begin(&tensor, &tensor, &now).err().unwrap().to_string();
    assert!(refused.contains("one must be the host's"), "{refused}");
}
