//! DeepSpeed's two int8 weight quantizers, over flat values.
//!
//! A group of nothing but zeros has the scale that gives zeros back, where DeepSpeed divides by zero.

/// Values of 8 bits, and the scale of each group.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// As many as there were weights.
    pub values: Vec<i8>,
    /// One for each group.
    pub scales: Vec<f32>,
}

/// The quantizer of kernel injection: `q = round(w / s)`, `s` such that the largest magnitude is 128 of it; half to even.
pub fn group_quantizer(weights: &[f32], groups: usize) -> Quantized {
    let groups = groups.max(1);
    let scales = group_scales(weights, groups);
    let size = weights.len().div_ceil(groups).max(1);
    let values = weights.chunks(size).zip(&scales).flat_map(|(group, &scale)| {
        group.iter().map(move |weight| {
            let steps = if scale > 0.0 { (weight / scale).round_ties_even() } else { 0.0 };
            steps.clamp(-128.0, 127.0) as i8
        })
    });
    Quantized { values: values.collect(), scales }
}

/// What a step is worth in each of `groups` equal parts.
pub fn group_scales(weights: &[f32], groups: usize) -> Vec<f32> {
    let size = weights.len().div_ceil(groups.max(1)).max(1);
    weights.chunks(size).map(|group| largest(group) * 2.0 / 256.0).collect()
}

/// The quantizer of state dicts: `q = round(w · s)`, `s = 2^bits / (2·m + 1e-5)` with the group's largest magnitude `m`.
/// The scales are `s`. Where `groups` does not divide the weights, each group has the whole part of them, and those that are left over make
/// further groups.
pub fn weight_quantization(weights: &[f32], bits: u32, groups: usize) -> Quantized {
    let size = (weights.len() / groups.max(1)).max(1);
    let range = 2f32.powi(bits.clamp(1, 8) as i32);
    let scale = |group: &[f32]| range / (2.0 * largest(group) + 1e-5);
    let scales: Vec<f32> = weights.chunks(size).map(scale).collect();
    let values = weights.chunks(size).zip(&scales).flat_map(|(group, scale)| {
        group.iter().map(move |weight| {
            (weight * scale).round_ties_even().clamp(-range / 2.0, range / 2.0 - 1.0) as i8
        })
    });
    Quantized { values: values.collect(), scales }
}

fn largest(group: &[f32]) -> f32 {
    group.iter().fold(0.0, |largest, weight| weight.abs().max(largest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_groups_do_not_divide_makes_groups_of_its_own() {
        let weights: Vec<f32> = (0..23).map(|index| (index as f32 * 0.7).sin()).collect();
        for (groups, sizes) in
            [(4, vec![5, 5, 5, 5, 3]), (5, vec![4, 4, 4, 4, 4, 3]), (1, vec![23]), (23, vec![1; 23])]
        {
            let found = weight_quantization(&weights, 8, groups);
            assert_eq!((found.values.len(), found.scales.len()), (23, sizes.len()), "{groups} groups");
            let mut start = 0;
            for (size, scale) in sizes.iter().zip(&found.scales) {
                let group = &weights[start..start + size];
                assert_eq!(*scale, 256.0 / (2.0 * largest(group) + 1e-5), "{groups} groups from {start}");
                start += size;
            }
        }
        assert!(weight_quantization(&[], 8, 3).scales.is_empty());
        assert_eq!(weight_quantization(&[0.5], 8, 3).scales.len(), 1);
    }
}
