//! What DeepSpeed's profiler takes an op to cost, from the shapes of its operands, its defects included: what recorded figures are
//! compared with. Our counts do not come from formulas.
//!
//! The defects: sums and products align shapes from the left, a right operand of one dimension counts its length twice,
//! `upsample` takes the batch size for the number of dimensions, a transposed convolution over groups is divided by them twice,
//! and `einsum` counts one operation too many and four digits.

use std::collections::{BTreeMap, BTreeSet};

/// An estimate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// Floating-point operations.
    pub(super) flops: u64,
    /// Multiply-accumulates.
    pub(super) macs: u64,
}

impl Cost {
    fn of_product(macs: u64) -> Cost {
        Cost { flops: 2 * macs, macs }
    }

    fn plus_flops(self, flops: u64) -> Cost {
        Cost { flops: self.flops + flops, ..self }
    }

    fn elementwise(flops: u64) -> Cost {
        Cost { flops, macs: 0 }
    }
}

fn elements(shape: &[u64]) -> u64 {
    shape.iter().product()
}

/// `linear(x [.., in], weight [out, in])`.
pub(super) fn linear(x: &[u64], weight: &[u64]) -> Cost {
    Cost::of_product(elements(x) * weight.first().copied().unwrap_or(1))
}

/// `matmul`, `mm`, `bmm`.
pub(super) fn matmul(a: &[u64], b: &[u64]) -> Cost {
    Cost::of_product(elements(a) * b.last().copied().unwrap_or(1))
}

/// `addmm`, `baddbmm`: a product and what is added to it.
pub(super) fn addmm(added: &[u64], a: &[u64], b: &[u64]) -> Cost {
    matmul(a, b).plus_flops(elements(added))
}

/// `scaled_dot_product_attention`; a causal mask spares nothing.
pub(super) fn attention(q: &[u64], k: &[u64], v: &[u64]) -> Cost {
    let last = |shape: &[u64], back: usize| shape.iter().rev().nth(back).copied().unwrap_or(1);
    let (rows, keys) = (elements(q) / last(q, 0).max(1), last(k, 1));
    Cost::of_product(elements(q) * keys + rows * keys * last(v, 0))
}

/// `add` and `mul`; `None` is a plain number.
pub(super) fn elementwise(a: Option<&[u64]>, b: Option<&[u64]>) -> Cost {
    let (a, b) = (a.unwrap_or(&[]), b.unwrap_or(&[]));
    let size = |shape: &[u64], dim: usize| shape.get(dim).copied().unwrap_or(1);
    Cost::elementwise((0..a.len().max(b.len())).map(|dim| size(a, dim).max(size(b, dim))).product())
}

/// `layer_norm`, `group_norm`, `instance_norm`.
pub(super) fn norm(x: &[u64], has_weight: bool) -> Cost {
    Cost::elementwise(elements(x) * (4 + u64::from(has_weight)))
}

/// `batch_norm`.
pub(super) fn batch_norm(x: &[u64], has_weight: bool, training: bool) -> Cost {
    match training {
        true => norm(x, has_weight),
        false => Cost::elementwise(elements(x) * (1 + u64::from(has_weight))),
    }
}

/// `upsample` to a size.
pub(super) fn upsample_to(size: &[u64]) -> Cost {
    Cost::elementwise(elements(size))
}

/// `upsample` by a factor.
pub(super) fn upsample_by(x: &[u64], factor: f64) -> Cost {
    let batch = x.first().copied().unwrap_or(0) as f64;
    Cost::elementwise((elements(x) as f64 * factor.powf(batch)) as u64)
}

/// What surrounds the input of a convolution, per dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Padding {
    /// Nothing.
    Valid,
    /// As much as keeps the size.
    Same,
    /// So much on both sides.
    Sizes(Vec<u64>),
}

/// How a convolution moves, per dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Convolution {
    /// Steps.
    pub(super) stride: Vec<u64>,
    /// The border.
    pub(super) padding: Padding,
    /// Distance of the kernel's elements.
    pub(super) dilation: Vec<u64>,
    /// Groups of channels.
    pub(super) groups: u64,
}

impl Convolution {
    /// Elements of the output of one channel.
    fn output(&self, input: &[u64], kernel: &[u64]) -> u64 {
        let size = |dim: usize| {
            let reach = self.dilation[dim] * (kernel[dim] - 1);
            let padding = match &self.padding {
                Padding::Valid => 0,
                Padding::Same => reach / 2,
                Padding::Sizes(sizes) => sizes[dim],
            };
            (input[dim] + 2 * padding).saturating_sub(reach + 1) / self.stride[dim] + 1
        };
        (0..kernel.len()).map(size).product()
    }
}

/// `conv1d`, `conv2d`, `conv3d` of `x [batch, in, ..]` with `weight [out, in / groups, ..]`; `None` where they do not fit.
pub(super) fn conv(x: &[u64], weight: &[u64], has_bias: bool, how: &Convolution) -> Option<Cost> {
    let ([batch, channels, input @ ..], [out, of_group, kernel @ ..]) = (x, weight) else { return None };
    if of_group * how.groups != *channels || input.len() != kernel.len() || !fits(how, kernel) {
        return None;
    }
    let places = batch * how.output(input, kernel);
    let macs = elements(kernel) * channels * (out / how.groups) * places;
    Some(Cost::of_product(macs).plus_flops(if has_bias { out * places } else { 0 }))
}

/// `conv_transpose1d`, `conv_transpose2d`, `conv_transpose3d` with `weight [in, out / groups, ..]`.
pub(super) fn conv_transpose(x: &[u64], weight: &[u64], has_bias: bool, how: &Convolution) -> Option<Cost> {
    let ([batch, channels, input @ ..], [_, out, kernel @ ..]) = (x, weight) else { return None };
    if input.len() != kernel.len() || !fits(how, kernel) {
        return None;
    }
    let macs = elements(kernel) * channels * (out / how.groups) * batch * elements(input);
    let bias = if has_bias { out * batch * how.output(input, kernel) } else { 0 };
    Some(Cost::of_product(macs).plus_flops(bias))
}

fn fits(how: &Convolution, kernel: &[u64]) -> bool {
    let padded = !matches!(&how.padding, Padding::Sizes(sizes) if sizes.len() != kernel.len());
    let moves = [&how.stride, &how.dilation];
    let positive = kernel.iter().chain(&how.stride).all(|&size| size > 0) && how.groups > 0;
    padded && positive && moves.iter().all(|sizes| sizes.len() == kernel.len())
}

type Indices = BTreeSet<char>;

/// All orders are tried, and their number grows faster than exponentially.
const MOST_OPERANDS: usize = 7;

/// `einsum` over operands of these shapes; `None` where the equation does not fit them. The order of contractions is the best
/// one whose intermediate results are no larger than the largest operand or the result.
pub(super) fn einsum(equation: &str, shapes: &[&[u64]]) -> Option<Cost> {
    let equation: String = equation.chars().filter(|letter| !letter.is_whitespace()).collect();
    let (inputs, output) = equation.split_once("->")?;
    let terms: Vec<&str> = inputs.split(',').collect();
    if terms.len() != shapes.len() || !(1..=MOST_OPERANDS).contains(&shapes.len()) {
        return None;
    }
    let mut sizes: BTreeMap<char, u64> = BTreeMap::new();
    for (term, shape) in terms.iter().zip(shapes) {
        if term.chars().count() != shape.len() {
            return None;
        }
        for (index, &size) in term.chars().zip(*shape) {
            let known = sizes.entry(index).or_insert(size);
            *known = (*known).max(size);
        }
    }
    let operands: Vec<Indices> = terms.iter().map(|term| term.chars().collect()).collect();
    let output: Indices = output.chars().collect();
    let size = |indices: &Indices| {
        indices.iter().map(|index| sizes.get(index).copied().unwrap_or(1) as f64).product::<f64>()
    };
    let cost = |(all, result): (&Indices, &Indices), operands: usize| {
        let factor = operands.saturating_sub(1).max(1) + usize::from(all != result);
        size(all) * factor as f64
    };
    let all: Indices = operands.iter().flatten().copied().collect();
    let total = if operands.len() <= 2 || all == output {
        cost((&all, &output), operands.len())
    } else {
        let limit = operands.iter().chain([&output]).map(size).fold(0.0, f64::max);
        best_order(operands, &output, limit, &size, &cost)
    };
    // The count is read from a text of four digits.
    let written = format!("{:.3e}", total + 1.0);
    Some(Cost::elementwise(written.parse::<f64>().unwrap_or(total) as u64))
}

/// The least cost of contracting two at a time; what no pair may follow is contracted at once.
fn best_order(
    operands: Vec<Indices>,
    output: &Indices,
    limit: f64,
    size: &impl Fn(&Indices) -> f64,
    cost: &impl Fn((&Indices, &Indices), usize) -> f64,
) -> f64 {
    let mut states = vec![(0.0, operands)];
    loop {
        let cheapest = |states: &[(f64, Vec<Indices>)]| -> (f64, Vec<Indices>) {
            states.iter().min_by(|a, b| a.0.total_cmp(&b.0)).cloned().unwrap_or_default()
        };
        if states[0].1.len() == 1 {
            return cheapest(&states).0;
        }
        let mut next = Vec::new();
        for (spent, operands) in &states {
            for right in 1..operands.len() {
                for left in 0..right {
                    let mut rest = operands.clone();
                    let (b, a) = (rest.remove(right), rest.remove(left));
                    let all: Indices = a.union(&b).copied().collect();
                    let needed = |index: &char| {
                        output.contains(index) || rest.iter().any(|operand| operand.contains(index))
                    };
                    let result: Indices = all.iter().copied().filter(needed).collect();
                    if size(&result) <= limit {
                        let spent = spent + cost((&all, &result), 2);
                        rest.push(result);
                        next.push((spent, rest));
                    }
                }
            }
        }
        if next.is_empty() {
            let (spent, operands) = cheapest(&states);
            let all: Indices = operands.iter().flatten().copied().collect();
            return spent + cost((&all, output), operands.len());
        }
        states = next;
    }
}

/// The kinds of recurrent layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recurrence {
    /// One gate.
    Rnn,
    /// Three gates.
    Gru,
    /// Four gates.
    Lstm,
}

/// One step of one recurrent layer for one sample.
pub(super) fn recurrent_step(kind: Recurrence, inputs: u64, hidden: u64, has_bias: bool) -> u64 {
    let (gates, own) = match kind {
        Recurrence::Rnn => (1, 1),
        Recurrence::Gru => (3, 7),
        Recurrence::Lstm => (4, 10),
    };
    let rows = gates * hidden;
    let products = (2 * rows * inputs).saturating_sub(rows) + (2 * rows * hidden).saturating_sub(rows);
    products + own * hidden + if has_bias { 2 * rows } else { 0 }
}
