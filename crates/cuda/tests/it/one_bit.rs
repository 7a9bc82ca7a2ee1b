//! Signs and the passes of 1-bit optimizers on a GPU, against plain loops.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use super::on_gpu::{TYPES, device, normal};
use ferrospeed_tensor::backend::{OneBitOperands, OneBitPace, OneBitPass, Rounding, SignMessages, Signed};
use ferrospeed_tensor::{DType, Device, Tensor};

/// Parts of a byte, whole ones, and more than a chunk.
const SIZES: [usize; 8] = [1, 7, 8, 9, 2047, 16_384, 16_385, 50_001];

fn on(device: &Device, values: &[f32]) -> Tensor {
    Tensor::from_slice(values, [values.len()], device).unwrap()
}

fn zeros(device: &Device, numel: usize, dtype: DType) -> Tensor {
    Tensor::zeros([numel], dtype, device).unwrap()
}

/// Elements of a rank's stretch: whole bytes of signs.
fn stretch(numel: usize, ranks: usize) -> usize {
    numel.div_ceil(ranks * 8) * 8
}

/// Where each tensor's message begins, and where the last one ends. A tensor behind a stretch of eight begins at an odd byte.
fn places(ranks: usize) -> (Vec<usize>, usize) {
    let mut end = 3;
    let mut place = |numel: &usize| {
        let start = end;
        end += 4 + stretch(*numel, ranks) / 8;
        start
    };
    (SIZES.iter().map(&mut place).collect(), end + 1)
}

fn signed(scale: f32, is_positive: bool) -> f32 {
    if is_positive { scale } else { -scale }
}

fn scale_in(message: &[u8]) -> f32 {
    f32::from_le_bytes(message[..4].try_into().unwrap())
}

/// Sign `i` of a message, the first of a byte the highest.
fn sign_in(message: &[u8], i: usize) -> bool {
    message[4 + i / 8] >> (7 - i % 8) & 1 == 1
}

/// What a tensor becomes when it is rounded.
fn rounded(values: &[f32], before: f32, given: impl Fn(usize) -> f32) -> Vec<f32> {
    let left = |value: f32| value - signed(before, value >= 0.0);
    values.iter().enumerate().map(|(i, &value)| left(value) + given(i)).collect()
}

/// That messages hold the signs of values, and their root mean square.
fn check_messages(what: &str, values: &[f32], scale: f32, messages: &[&[u8]]) {
    let squares: f64 = values.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    let truth = (squares / values.len() as f64).sqrt();
    assert!((f64::from(scale) - truth).abs() <= 1e-6 * truth, "{what}: {scale}, not {truth}");
    for (message, values) in messages.iter().zip(values.chunks(values.len() / messages.len())) {
        assert_eq!(scale_in(message), scale, "{what}: the size that is sent");
        for (i, value) in values.iter().enumerate() {
            assert_eq!(sign_in(message, i), *value >= 0.0, "{what}: sign {i} of {value}");
        }
    }
}

#[test]
fn values_become_signs_and_what_is_lost_comes_next() {
    let Some(gpu) = device() else { return };
    for ranks in [1, 2, 3] {
        let (at, total) = places(ranks);
        let padded: Vec<usize> = SIZES.iter().map(|&numel| stretch(numel, ranks) * ranks).collect();
        let values: Vec<Tensor> = padded.iter().map(|&numel| zeros(&gpu, numel, DType::F32)).collect();
        let scales: Vec<Tensor> = SIZES.iter().map(|_| zeros(&gpu, 1, DType::F32)).collect();
        for round in 0..3 {
            let given: Vec<Vec<f32>> =
                SIZES.iter().zip(1..).map(|(&numel, at)| normal(&[numel], round * 10 + at)).collect();
            let there: Vec<Tensor> = given.iter().map(|given| on(&gpu, given)).collect();
            let before: Vec<(Vec<f32>, f32)> = values
                .iter()
                .zip(&scales)
                .map(|(values, scale)| (values.to_vec().unwrap(), scale.to_vec::<f32>().unwrap()[0]))
                .collect();
            let sent = zeros(&gpu, total * ranks, DType::U8);
            let rounding = |index: usize| Rounding {
                values: &values[index],
                scale: &scales[index],
                given: Some(&there[index]),
                at: at[index],
            };
            let roundings: Vec<Rounding<'_>> = (0..SIZES.len()).map(rounding).collect();
            gpu.backend().round_to_signs(&roundings, None, SignMessages { bytes: &sent, ranks }).unwrap();
            let bytes = sent.to_vec::<u8>().unwrap();
            for (index, numel) in SIZES.iter().enumerate() {
                let what = format!("{numel} values to {ranks} ranks, round {round}");
                let (old, scale) = &before[index];
                let truth = rounded(old, *scale, |i| given[index].get(i).copied().unwrap_or(0.0));
                let found = values[index].to_vec::<f32>().unwrap();
                assert!(found == truth, "{what}: what is left, with what is given");
                let own: Vec<&[u8]> = bytes.chunks(total).map(|bytes| &bytes[at[index]..]).collect();
                check_messages(&what, &found, scales[index].to_vec::<f32>().unwrap()[0], &own);
            }
            // Nothing beside the messages.
            assert!(bytes.chunks(total).all(|bytes| bytes[..3] == [0; 3] && bytes[total - 1] == 0));
        }
    }
}

/// Messages as ranks send them, of stretches of all sizes.
fn messages(ranks: usize, at: &[usize], total: usize, per_message: impl Fn(usize) -> usize) -> Vec<u8> {
    let mut bytes = vec![0u8; total * ranks];
    for (rank, bytes) in bytes.chunks_mut(total).enumerate() {
        for (index, &at) in at.iter().enumerate() {
            let scale = 0.25 + rank as f32 * 0.17 + index as f32;
            bytes[at..at + 4].copy_from_slice(&scale.to_le_bytes());
            for byte in 0..per_message(index) / 8 {
                bytes[at + 4 + byte] = (byte * 37 + rank * 101 + index * 7) as u8;
            }
        }
    }
    bytes
}

#[test]
fn the_mean_of_what_ranks_sent_becomes_signs_and_values_again() {
    let Some(gpu) = device() else { return };
    for ranks in [2, 3, 5] {
        let (at, total) = places(ranks);
        let of = |index: usize| stretch(SIZES[index], ranks);
        let bytes = messages(ranks, &at, total, of);
        let received = on_bytes(&gpu, &bytes);
        let before: Vec<Vec<f32>> = (0..SIZES.len()).map(|index| normal(&[of(index)], 50)).collect();
        let values: Vec<Tensor> = before.iter().map(|values| on(&gpu, values)).collect();
        let scales: Vec<Tensor> = SIZES.iter().map(|_| on(&gpu, &[0.4])).collect();
        let own = zeros(&gpu, total, DType::U8);
        let rounding = |index: usize| Rounding {
            values: &values[index],
            scale: &scales[index],
            given: None,
            at: at[index],
        };
        let roundings: Vec<Rounding<'_>> = (0..SIZES.len()).map(rounding).collect();
        let from_all = SignMessages { bytes: &received, ranks };
        let to_all = SignMessages { bytes: &own, ranks: 1 };
        gpu.backend().round_to_signs(&roundings, Some(from_all), to_all).unwrap();
        let made = own.to_vec::<u8>().unwrap();
        let taken: Vec<Tensor> = SIZES.iter().map(|&numel| zeros(&gpu, numel, DType::F32)).collect();
        let signs = |index: usize| Signed { values: &taken[index], stretch: of(index), at: at[index] };
        let signs: Vec<Signed<'_>> = (0..SIZES.len()).map(signs).collect();
        gpu.backend().take_signs(&signs, from_all).unwrap();
        for (index, &numel) in SIZES.iter().enumerate() {
            let what = format!("{numel} values from {ranks} ranks");
            let sent: Vec<&[u8]> = bytes.chunks(total).map(|bytes| &bytes[at[index]..]).collect();
            let mean = |i: usize| {
                let factor = 1.0 / ranks as f32;
                let values = sent.iter().map(|sent| signed(scale_in(sent) * factor, sign_in(sent, i)));
                values.fold(0.0f32, |sum, value| sum + value)
            };
            let found = values[index].to_vec::<f32>().unwrap();
            assert!(found == rounded(&before[index], 0.4, mean), "{what}: the mean");
            let scale = scales[index].to_vec::<f32>().unwrap()[0];
            check_messages(&what, &found, scale, &[&made[at[index]..]]);
            let value = |i: usize| {
                let sent = sent[i / of(index)];
                signed(scale_in(sent), sign_in(sent, i % of(index)))
            };
            let truth: Vec<f32> = (0..numel).map(value).collect();
            assert!(taken[index].to_vec::<f32>().unwrap() == truth, "{what}: what is taken");
        }
    }
}

fn on_bytes(device: &Device, bytes: &[u8]) -> Tensor {
    Tensor::from_slice(bytes, [bytes.len()], device).unwrap()
}

/// One parameter on the host.
#[derive(Clone)]
struct Whole {
    weights: Vec<f32>,
    gradient: Vec<f32>,
    states: [Vec<f32>; 3],
    values: Vec<f32>,
    number: f32,
}

/// Those of all sizes, some of whose second moments are zero; of each the tensors, which lie end to end. Signs are such that nothing
/// cancels what roundings are compared by.
fn parameters(device: &Device, dtype: DType, sign_of_values: f32) -> (Vec<Whole>, Vec<OneBitOperands>) {
    let wholes: Vec<Whole> = SIZES
        .iter()
        .zip(1u32..)
        .map(|(&numel, at)| {
            let drawn = |stream: u32| -> Vec<f32> {
                normal(&[numel], at * 20 + stream).into_iter().map(f32::abs).collect()
            };
            let second = |stream| {
                let squares = drawn(stream).into_iter().map(|value| value * value * 0.01);
                squares.enumerate().map(|(i, square)| if i % 5 == 3 { 0.0 } else { square }).collect()
            };
            let gradient = Tensor::from_f32(&drawn(1), [numel], dtype, device).unwrap();
            Whole {
                weights: drawn(0),
                gradient: gradient.to_vec_f32().unwrap(),
                states: [drawn(2), second(3), second(4)],
                values: drawn(5).into_iter().map(|value| value * sign_of_values).collect(),
                number: 0.3 + at as f32 * 0.1,
            }
        })
        .collect();
    let total: usize = SIZES.iter().sum();
    let flat = |of: &dyn Fn(&Whole) -> Vec<f32>| wholes.iter().flat_map(of).collect::<Vec<f32>>();
    let weights = on(device, &flat(&|whole| whole.weights.clone()));
    let gradient = Tensor::from_f32(&flat(&|whole| whole.gradient.clone()), [total], dtype, device).unwrap();
    let states = [0, 1, 2].map(|state| on(device, &flat(&|whole| whole.states[state].clone())));
    let values = on(device, &flat(&|whole| whole.values.clone()));
    let copy = (dtype != DType::F32).then(|| zeros(device, total, dtype));
    let mut start = 0;
    let mut piece = |whole: &Whole| {
        let numel = whole.weights.len();
        let cut = |flat: &Tensor| flat.slice(start, [numel]).unwrap();
        let piece = OneBitOperands {
            weights: cut(&weights),
            gradient: Some(cut(&gradient)),
            states: states.iter().map(cut).collect(),
            values: Some(cut(&values)),
            copy: copy.as_ref().map(cut),
            number: whole.number,
        };
        start += numel;
        piece
    };
    let pieces = wholes.iter().map(&mut piece).collect();
    (wholes, pieces)
}

/// What gradients are multiplied by.
const FACTOR: f32 = 0.5;

fn passes() -> Vec<OneBitPass> {
    let (beta, rest, eps, decay) = (0.9, 0.1, 1e-8, 0.02);
    let pace = OneBitPace { lr: 0.01, decay, eps };
    let (betas, rests) = ([0.9, 0.99], [0.1, 0.01]);
    vec![
        OneBitPass::GiveMomentum { beta, rest },
        OneBitPass::GiveMomentum { beta: 0.0, rest: 1.0 },
        OneBitPass::Take { beta, rest, pace },
        OneBitPass::Take { beta: 0.0, rest: 1.0, pace },
        OneBitPass::Travel { beta, rest, pace },
        OneBitPass::GoBack { eps },
        OneBitPass::Arrive { eps },
        OneBitPass::Sizes,
        OneBitPass::Direct { betas, rest: rests, eps, decay },
        OneBitPass::Correct { betas, rest: rests, eps, decay },
        OneBitPass::Follow,
    ]
}

fn measures(pass: &OneBitPass) -> bool {
    matches!(pass, OneBitPass::Sizes | OneBitPass::Direct { .. } | OneBitPass::Correct { .. })
}

fn changes_copy(pass: &OneBitPass) -> bool {
    !measures(pass) && !matches!(pass, OneBitPass::GiveMomentum { .. } | OneBitPass::GoBack { .. })
}

/// A pass over one element, in f64; what it measures.
fn plain(pass: &OneBitPass, number: f64, g: f64, [w, m, v, third, x]: [&mut f64; 5]) -> [f64; 3] {
    let known = |averaged: f64, v: f64| if v == 0.0 { 0.0 } else { averaged };
    let wide = f64::from;
    let step = |pace: &OneBitPace, w: f64, m: f64, v: f64| {
        wide(pace.lr) * (m / (v.sqrt() + wide(pace.eps)) + wide(pace.decay) * w)
    };
    match pass {
        OneBitPass::GiveMomentum { beta, rest } => *x = (wide(*beta) * *m + wide(*rest) * g) * number,
        OneBitPass::Take { beta, rest, pace } => {
            *m = wide(*beta) * *m + wide(*rest) * known(*x, *v);
            *w -= step(pace, *w, *m, *v);
        }
        OneBitPass::Travel { beta, rest, pace } => {
            *m = wide(*beta) * *m + wide(*rest) * g;
            let step = step(pace, *w, *m, *v);
            *w -= step;
            *third -= step;
        }
        OneBitPass::GoBack { eps } => {
            *w -= *third;
            *x = *third * (v.sqrt() + wide(*eps));
        }
        OneBitPass::Arrive { eps } => {
            let way = known(*x, *v);
            *m = -way / number;
            *w += way / (v.sqrt() + wide(*eps));
            *third = 0.0;
        }
        OneBitPass::Sizes => return [*m * *m, 0.0, 0.0],
        OneBitPass::Direct { betas, rest, eps, decay } => {
            *m = wide(betas[0]) * *m + wide(rest[0]) * g;
            *v = wide(betas[1]) * *v + wide(rest[1]) * g * g;
            *third = *v;
            *x = *m / (v.sqrt() + wide(*eps)) + wide(*decay) * *w;
            return [*w * *w, *x * *x, 0.0];
        }
        OneBitPass::Correct { betas, rest, eps, decay } => {
            let (new, root) = (known(*x / number, *v), v.sqrt() + wide(*eps));
            let g = (new - wide(betas[0]) * *m) / wide(rest[0]);
            *m = new;
            *third = wide(betas[1]) * *third + wide(rest[1]) * g * g;
            let direction = new / root;
            *x = direction + wide(*decay) * *w;
            return [direction * direction, *x * *x, root / (third.sqrt() + wide(*eps))];
        }
        OneBitPass::Follow => *w -= number * *x,
    }
    [0.0; 3]
}

/// A weight whose second moment is nothing goes any distance in one step; elsewhere f32 is exact to a few roundings.
fn assert_like(what: &str, found: &[f32], truth: &[f64]) {
    for (i, (found, truth)) in found.iter().zip(truth).enumerate() {
        let close = (f64::from(*found) - truth).abs() <= 4e-6 * truth.abs().max(1e-1);
        assert!(close, "{what}: element {i} is {found}, not {truth}");
    }
}

#[test]
fn passes_are_as_plain_loops_do_them() {
    let Some(gpu) = device() else { return };
    for dtype in TYPES {
        for pass in passes() {
            // What leads from one momentum to another one is their difference.
            let sign = if matches!(pass, OneBitPass::Correct { .. }) { -1.0 } else { 1.0 };
            let (wholes, pieces) = parameters(&gpu, dtype, sign);
            let list = [(pass, pieces.clone())];
            let found = match measures(&pass) {
                true => gpu.backend().one_bit_measured(FACTOR, &list).unwrap(),
                false => {
                    gpu.backend().one_bit(FACTOR, &list).unwrap();
                    vec![[0.0; 3]; wholes.len()]
                }
            };
            for ((whole, piece), found) in wholes.iter().zip(&pieces).zip(found) {
                let what = format!("{pass:?}, {dtype}, {} elements", whole.weights.len());
                let mut all = [vec![], vec![], vec![], vec![], vec![]];
                let mut truth = [0.0f64; 3];
                for i in 0..whole.weights.len() {
                    let [m, v, third] = [0, 1, 2].map(|state: usize| whole.states[state][i]);
                    let mut own = [whole.weights[i], m, v, third, whole.values[i]].map(f64::from);
                    let g = f64::from(whole.gradient[i] * FACTOR);
                    let [a, b, most] =
                        plain(&pass, f64::from(whole.number), g, own.each_mut().map(|value| value));
                    truth = [truth[0] + a, truth[1] + b, truth[2].max(most)];
                    all.iter_mut().zip(own).for_each(|(all, own)| all.push(own));
                }
                for (found, truth) in found.iter().zip(truth) {
                    assert!((found - truth).abs() <= 1e-5 * truth, "{what}: measures {found}, not {truth}");
                }
                let tensors = [&piece.weights, &piece.states[0], &piece.states[1], &piece.states[2]];
                let tensors = tensors.into_iter().chain(&piece.values);
                for ((tensor, truth), name) in
                    tensors.zip(&all).zip(["weights", "m", "v", "the third", "values"])
                {
                    assert_like(&format!("{what}: {name}"), &tensor.to_vec::<f32>().unwrap(), truth);
                }
                if let Some(copy) = &piece.copy {
                    let weights = piece.weights.to_vec::<f32>().unwrap();
                    let rounded =
                        Tensor::from_f32(&weights, [weights.len()], dtype, &ferrospeed_cpu::device())
                            .unwrap();
                    let truth = match changes_copy(&pass) {
                        true => rounded.to_vec_f32().unwrap(),
                        false => vec![0.0; weights.len()],
                    };
                    assert!(copy.to_vec_f32().unwrap() == truth, "{what}: the copy");
                }
            }
        }
    }
}

#[test]
fn measures_have_the_same_bits_again_and_pieces_are_numbered_through() {
    let Some(gpu) = device() else { return };
    let measured = |ends: &[usize]| {
        let (_, pieces) = parameters(&gpu, DType::F32, 1.0);
        let mut start = 0;
        let mut list = Vec::new();
        for &end in ends {
            list.push((OneBitPass::Sizes, pieces[start..end].to_vec()));
            start = end;
        }
        gpu.backend().one_bit_measured(1.0, &list).unwrap()
    };
    let all = measured(&[SIZES.len()]);
    assert_eq!(all.len(), SIZES.len());
    assert!(measured(&[SIZES.len()]) == all);
    assert!(measured(&[2, 2, 5, SIZES.len()]) == all, "in several passes, one of them over nothing");
}

#[test]
fn what_a_pass_lacks_is_refused() {
    let Some(gpu) = device() else { return };
    let (_, pieces) = parameters(&gpu, DType::BF16, 1.0);
    let piece = &pieces[3];
    let take = OneBitPass::Take { beta: 0.9, rest: 0.1, pace: OneBitPace { lr: 0.1, decay: 0.0, eps: 1e-8 } };
    let refused = |pass: OneBitPass, piece: OneBitOperands| {
        gpu.backend().one_bit(1.0, &[(pass, vec![piece])]).unwrap_err().to_string()
    };
    assert!(refused(take, OneBitOperands { values: None, ..piece.clone() }).contains("lacks"));
    let give = OneBitPass::GiveMomentum { beta: 0.9, rest: 0.1 };
    assert!(refused(give, OneBitOperands { gradient: None, ..piece.clone() }).contains("lacks"));
    let short = OneBitOperands { values: pieces[0].values.clone(), ..piece.clone() };
    assert!(refused(take, short).contains("beside 9 weights"));
    assert!(refused(OneBitPass::Sizes, piece.clone()).contains("measures"));
    let (values, scale, bytes) =
        (zeros(&gpu, 24, DType::F32), zeros(&gpu, 1, DType::F32), zeros(&gpu, 12, DType::U8));
    let rounding = Rounding { values: &values, scale: &scale, given: Some(&values), at: 0 };
    // Two ranks would get signs for a byte and a half each, three need a byte more than there is.
    for ranks in [2, 3] {
        let sent = SignMessages { bytes: &bytes, ranks };
        assert!(gpu.backend().round_to_signs(&[rounding], None, sent).is_err(), "{ranks} ranks");
    }
}

#[test]
fn the_processor_leaves_it_to_its_own_loops() {
    let cpu = ferrospeed_cpu::device();
    let (_, pieces) = parameters(&cpu, DType::F32, 1.0);
    let refused = cpu.backend().one_bit(1.0, &[(OneBitPass::Follow, pieces)]).unwrap_err();
    assert!(refused.to_string().contains("the host's own loops"), "{refused}");
}
