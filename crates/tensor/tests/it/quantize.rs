//! Quantised blocks: the recorded quantizer to the bit, and what the recordings do not show.
//!
//! `zero/quantizer.json` was computed from the formulas of DeepSpeed's kernels; the last result of its two-level exchange
//! is divided by the number of hosts alone, which `qgz` therefore repeats.

use ferrospeed_tensor::quantize::{Bits, Format, Quantized};
use ferrospeed_testkit::cases::Cases;
use ferrospeed_testkit::golden::golden;
use half::{bf16, f16};
use serde_json::Value;

const FILE: &str = "zero/quantizer.json";
const INT4: Format = Format { bits: Bits::Four, symmetric: true };
const INT8: Format = Format { bits: Bits::Eight, symmetric: true };

/// The hosts of a two-level exchange, all with as many devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TwoLevel {
    /// How many hosts.
    hosts: usize,
    /// Devices of each.
    devices: usize,
}

impl TwoLevel {
    /// Where the partition of a rank lies when partitions are ordered by device, then by host: what one device of a host
    /// collects from its neighbours is then one stretch, with a partition for each host.
    fn slot(self, rank: usize) -> usize {
        (rank % self.devices) * self.hosts + rank / self.devices
    }
}

/// Quantizes with the partitions of all ranks in the order of [`TwoLevel::slot`]; each is a whole number of groups.
fn quantize_swizzled(
    format: Format,
    values: &[f16],
    group: usize,
    ranks: TwoLevel,
    packed: &mut [u8],
    params: &mut [f32],
) {
    let numel = values.len() / (ranks.hosts * ranks.devices);
    let (bytes, numbers) = (format.packed_len(numel), format.params_len(numel, group));
    for (rank, values) in values.chunks_exact(numel).enumerate() {
        let slot = ranks.slot(rank);
        let packed = &mut packed[slot * bytes..(slot + 1) * bytes];
        format.quantize(values, group, packed, &mut params[slot * numbers..(slot + 1) * numbers]);
    }
}

/// Elements of a group below which DeepSpeed cuts no further, and those that no group reaches.
const PREFERRED_GROUP: usize = 8000;
const LARGEST_GROUP: usize = 16000;

/// In how many equal groups DeepSpeed gathers so many quantised weights: whole multiples of eight elements each, at most
/// about eight thousand; `None` where there is no such number.
fn equal_groups(numel: usize) -> Option<usize> {
    if numel == 0 || !numel.is_multiple_of(8) {
        return None;
    }
    let mut groups = numel.div_ceil(PREFERRED_GROUP);
    while groups < numel && !numel.is_multiple_of(8 * groups) {
        groups += 1;
    }
    while numel.is_multiple_of(16 * groups) && numel / groups > PREFERRED_GROUP {
        groups *= 2;
    }
    (numel.is_multiple_of(8 * groups) && numel / groups < LARGEST_GROUP && numel > groups).then_some(groups)
}

/// Every case of one list of the recording.
fn each(list: &str, known: usize, mut compare: impl FnMut(&Value)) {
    let set = golden();
    let mut cases = Cases::of(FILE);
    let document = set.json(FILE).unwrap_or_default();
    for (index, case) in document[list].as_array().into_iter().flatten().enumerate() {
        let name = case["name"].as_str().map_or_else(|| format!("{list} {index}"), str::to_owned);
        cases.check(name, || compare(case));
    }
    cases.finish(&set, known);
}

fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(floats).collect(),
        number => vec![number.as_f64().expect("a number") as f32],
    }
}

fn halves(value: &Value) -> Vec<f16> {
    floats(value).into_iter().map(f16::from_f32).collect()
}

fn bytes(value: &Value) -> Vec<u8> {
    floats(value).into_iter().map(|value| value as i8 as u8).collect()
}

fn size(value: &Value) -> usize {
    value.as_u64().expect("a count") as usize
}

/// Values as integers and numbers.
fn quantized(format: Format, values: &[f16], groups: usize) -> (Vec<u8>, Vec<f32>) {
    let group = values.len() / groups;
    let mut packed = vec![0; format.packed_len(values.len())];
    let mut params = vec![0.0; format.params_len(values.len(), group)];
    format.quantize(values, group, &mut packed, &mut params);
    (packed, params)
}

/// One of so many equal stretches.
fn stretch((packed, params): &(Vec<u8>, Vec<f32>), of: usize, index: usize) -> Quantized<'_> {
    let (bytes, numbers) = (packed.len() / of, params.len() / of);
    Quantized {
        packed: &packed[index * bytes..(index + 1) * bytes],
        params: &params[index * numbers..(index + 1) * numbers],
    }
}

#[test]
fn blocks_are_as_recorded() {
    each("block_cases", 12, |case| {
        let bits = if size(&case["bits"]) == 4 { Bits::Four } else { Bits::Eight };
        let format = Format { bits, symmetric: case["symmetric"].as_bool().expect("a flag") };
        let (input, groups) = (halves(&case["input_f16"]), size(&case["groups"]));
        let (packed, params) = quantized(format, &input, groups);
        assert_eq!(packed, bytes(&case["packed_int8"]), "packed");
        assert_eq!(params, floats(&case["params"]), "params");
        let mut back = vec![f16::ZERO; input.len()];
        let source = Quantized { packed: &packed, params: &params };
        format.dequantize(source, input.len() / groups, &mut back);
        assert_eq!(back, halves(&case["dequant_f16"]), "dequantised");
    });
}

#[test]
fn weights_are_gathered_in_as_many_groups_as_recorded() {
    each("qwz_group_count", 13, |case| {
        let expected = case["groups"].as_u64().map(|groups| groups as usize);
        assert_eq!(equal_groups(size(&case["numel"])), expected);
    });
}

#[test]
fn partitions_are_swizzled_as_recorded() {
    each("swizzle", 3, |case| {
        let ranks = TwoLevel { hosts: size(&case["nodes"]), devices: size(&case["devices_per_node"]) };
        let per_partition = size(&case["groups_per_partition"]);
        let slot = |group: usize| ranks.slot(group / per_partition) * per_partition + group % per_partition;
        let groups = ranks.hosts * ranks.devices * per_partition;
        let found: Vec<f32> = (0..groups).map(|group| slot(group) as f32).collect();
        assert_eq!(found, floats(&case["in_group_to_out_group"]));
    });
}

#[test]
fn a_two_level_reduction_is_as_recorded_at_every_hop() {
    each("qgz", 1, |case| {
        let (hosts, devices) = (size(&case["nodes"]), size(&case["devices_per_node"]));
        let (ranks, intra, inter) =
            (TwoLevel { hosts, devices }, size(&case["intra_quant_group"]), size(&case["inter_quant_group"]));
        let grads: Vec<Vec<f16>> = case["grads_f16"].as_array().unwrap().iter().map(halves).collect();
        let numel = grads[0].len();
        let mut sent = Vec::new();
        for (rank, grad) in grads.iter().enumerate() {
            let (mut packed, mut params) = (vec![0; numel / 2], vec![0.0; intra]);
            quantize_swizzled(INT4, grad, numel / intra, ranks, &mut packed, &mut params);
            let nibbles = packed.iter().flat_map(|&byte| [byte as i8 >> 4, (byte << 4) as i8 >> 4]);
            let nibbles: Vec<f32> = nibbles.map(f32::from).collect();
            assert_eq!(nibbles, floats(&case["intra_swizzled_q"][rank]), "rank {rank}: first hop");
            assert_eq!(params, floats(&case["intra_swizzled_scale"][rank]), "rank {rank}: its steps");
            sent.push((packed, params));
        }
        // Within each host, device d gets the d-th stretch of everybody.
        let mut again = Vec::new();
        for rank in 0..hosts * devices {
            let (host, device) = (rank / devices, rank % devices);
            let sources: Vec<_> =
                (0..devices).map(|from| stretch(&sent[host * devices + from], devices, device)).collect();
            let mut reduced = vec![f16::ZERO; numel / devices];
            INT4.dequantize_sum(&sources, numel / intra, 1.0, &mut reduced);
            assert_eq!(reduced, halves(&case["reduced_f16"][rank]), "rank {rank}: within its host");
            again.push(quantized(INT4, &reduced, inter));
        }
        for rank in 0..hosts * devices {
            let (host, device) = (rank / devices, rank % devices);
            let sources: Vec<_> =
                (0..hosts).map(|from| stretch(&again[from * devices + device], hosts, host)).collect();
            let mut output = vec![f16::ZERO; numel / devices / hosts];
            INT4.dequantize_sum(&sources, numel / devices / inter, 1.0 / hosts as f32, &mut output);
            assert_eq!(output, halves(&case["output_f16"][rank]), "rank {rank}: the end");
        }
    });
}

fn values(numel: usize) -> Vec<f32> {
    (0..numel).map(|i| ((i * 7919) % 1013) as f32 / 97.0 - 5.0).collect()
}

/// Quantised and back.
fn round_trip(format: Format, values: &[f32], group: usize) -> Vec<f32> {
    let mut packed = vec![0; format.packed_len(values.len())];
    let mut params = vec![0.0; format.params_len(values.len(), group)];
    format.quantize(values, group, &mut packed, &mut params);
    let mut back = vec![0.0; values.len()];
    format.dequantize(Quantized { packed: &packed, params: &params }, group, &mut back);
    back
}

#[test]
fn every_value_comes_back_within_a_step_whatever_the_last_groups_length() {
    for (bits, range) in [(Bits::Four, 16.0), (Bits::Eight, 256.0)] {
        for symmetric in [true, false] {
            for (numel, group) in [(1, 2), (7, 4), (513, 64), (1000, 300), (2049, 2048)] {
                let (given, format) = (values(numel), Format { bits, symmetric });
                let back = round_trip(format, &given, group);
                for (given, back) in given.chunks(group).zip(back.chunks(group)) {
                    let most = given.iter().copied().fold(f32::MIN, f32::max);
                    let least = given.iter().copied().fold(f32::MAX, f32::min);
                    let span = if symmetric { 2.0 * most.max(-least) } else { most - least };
                    for (given, back) in given.iter().zip(back) {
                        assert!(
                            (given - back).abs() <= span / range * 1.001,
                            "{format:?} {numel} {given} {back}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_group_with_what_is_no_number_comes_back_as_none_and_spares_its_neighbours() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for symmetric in [true, false] {
            let mut given = values(64);
            given[20] = bad;
            let back = round_trip(Format { bits: Bits::Four, symmetric }, &given, 16);
            let is_bad: Vec<bool> = back.chunks(16).map(|group| group.iter().all(|v| v.is_nan())).collect();
            assert_eq!(is_bad, [false, true, false, false], "{bad} {symmetric}");
            assert!(back[..16].iter().chain(&back[32..]).all(|value| value.is_finite()));
        }
    }
}

#[test]
fn a_sum_of_several_is_the_sum_of_each() {
    let (numel, group) = (700, 128);
    let parts: Vec<(Vec<u8>, Vec<f32>)> = (1..4)
        .map(|rank| {
            let given: Vec<bf16> = values(numel).iter().map(|v| bf16::from_f32(v * rank as f32)).collect();
            let (mut packed, mut params) = (vec![0; numel], vec![0.0; INT8.params_len(numel, group)]);
            INT8.quantize(&given, group, &mut packed, &mut params);
            (packed, params)
        })
        .collect();
    let sources: Vec<_> = parts.iter().map(|(packed, params)| Quantized { packed, params }).collect();
    let mut each = vec![0.0f32; numel];
    for source in &sources {
        let mut one = vec![bf16::ZERO; numel];
        INT8.dequantize(*source, group, &mut one);
        each.iter_mut().zip(&one).for_each(|(sum, one)| *sum += one.to_f32());
    }
    let mut sum = vec![bf16::ZERO; numel];
    INT8.dequantize_sum(&sources, group, 0.5, &mut sum);
    let expected: Vec<bf16> = each.iter().map(|each| bf16::from_f32(each * 0.5)).collect();
    assert_eq!(sum, expected);
}

#[test]
fn turned_groups_lose_half_a_step_at_most_and_nothing_when_quantised_again() {
    for (format, levels) in [(INT4, 8.0), (INT8, 128.0)] {
        for sign in [1.0, -1.0] {
            let values: Vec<f32> = (0..600).map(|i| sign * (i as f32 * 0.37).sin().abs()).collect();
            let again = |values: &[f32]| {
                let mut packed = vec![0; format.packed_len(values.len())];
                let mut params = vec![0.0; format.params_len(values.len(), 512)];
                format.quantize_turned(values, 512, &mut packed, &mut params);
                let mut back = vec![0.0f32; values.len()];
                format.dequantize(Quantized { packed: &packed, params: &params }, 512, &mut back);
                back
            };
            let back = again(&values);
            for (value, back) in values.iter().zip(&back) {
                assert!((value - back).abs() <= 0.5 / levels + 1e-6, "{format:?} {value} {back}");
            }
            assert_eq!(again(&back), back, "{format:?}");
        }
    }
    let (mut packed, mut params) = ([0u8; 1], [0.0f32; 1]);
    INT8.quantize_turned(&[f32::NAN], 1, &mut packed, &mut params);
    assert!(params[0].is_nan());
}
