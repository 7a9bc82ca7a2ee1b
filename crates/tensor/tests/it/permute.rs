//! Other orders of dimensions and strided copies against plain loops, on every device that is there.

use super::devices::devices;
use ferrospeed_tensor::{DType, Device, Tensor, ops};

/// Types of 1, 2, 4 and 8 bytes.
const TYPES: [DType; 4] = [DType::U8, DType::BF16, DType::F32, DType::I64];

/// Numbers that every type holds and that tell neighbours apart, also those of neighbouring rows.
fn numbers(count: usize) -> Vec<i64> {
    (0..count as i64).map(|i| i * 7 % 251).collect()
}

fn tensor(values: &[i64], dtype: DType, device: &Device) -> Tensor {
    let shape = [values.len()];
    match dtype {
        DType::U8 => {
            let bytes: Vec<u8> = values.iter().map(|&value| value as u8).collect();
            Tensor::from_slice(&bytes, shape, device).unwrap()
        }
        DType::I64 => Tensor::from_slice(values, shape, device).unwrap(),
        _ => {
            let floats: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            Tensor::from_f32(&floats, shape, dtype, device).unwrap()
        }
    }
}

fn values(tensor: &Tensor) -> Vec<i64> {
    match tensor.dtype() {
        DType::U8 => tensor.to_vec::<u8>().unwrap().into_iter().map(i64::from).collect(),
        DType::I64 => tensor.to_vec::<i64>().unwrap(),
        _ => tensor.to_vec_f32().unwrap().into_iter().map(|value| value as i64).collect(),
    }
}

fn orders(dims: usize) -> Vec<Vec<usize>> {
    if dims == 0 {
        return vec![Vec::new()];
    }
    let shorter = orders(dims - 1);
    let longer = |order: &Vec<usize>| {
        (0..dims).map(|at| [&order[..at], &[dims - 1], &order[at..]].concat()).collect::<Vec<_>>()
    };
    shorter.iter().flat_map(longer).collect()
}

/// By the meaning: element `i` of the result is where its coordinates, put back in order, lie in `x`.
fn by_hand(x: &[i64], sizes: &[usize], order: &[usize]) -> Vec<i64> {
    let element = |i: usize| {
        let mut rest = i;
        let mut place = vec![0; sizes.len()];
        for &dim in order.iter().rev() {
            place[dim] = rest % sizes[dim];
            rest /= sizes[dim];
        }
        x[place.iter().zip(sizes).fold(0, |at, (place, size)| at * size + place)]
    };
    (0..x.len()).map(element).collect()
}

#[test]
fn every_order_of_dimensions_is_what_its_meaning_says() {
    let shapes: [&[usize]; 14] = [
        &[],
        &[7],
        &[33, 65],
        &[64, 16],
        &[130, 3],
        &[5, 17, 40],
        &[16, 1, 48],
        &[4, 0, 3],
        &[2, 3, 17, 35],
        &[3, 16, 4, 8],
        &[1, 40, 2, 24],
        &[2, 3, 5, 4, 17],
        &[2, 1, 33, 2, 32],
        &[3, 18, 2, 1, 16],
    ];
    for device in devices() {
        for sizes in shapes {
            let count: usize = sizes.iter().product();
            // Behind others in memory, so that not everything is aligned.
            for (dtype, before) in TYPES.into_iter().flat_map(|dtype| [(dtype, 0), (dtype, 1), (dtype, 4)]) {
                let all = numbers(before + count);
                let x = tensor(&all, dtype, &device).slice(before, sizes).unwrap();
                for order in orders(sizes.len()) {
                    let y = ops::permute(&x, &order).unwrap();
                    let what = format!("{dtype} {sizes:?} {order:?} on {}", device.backend().name());
                    assert_eq!(y.sizes(), order.iter().map(|&dim| sizes[dim]).collect::<Vec<_>>(), "{what}");
                    assert!(values(&y) == by_hand(&all[before..], sizes, &order), "{what}");
                }
            }
        }
    }
}

#[test]
fn nothing_is_copied_where_only_dimensions_of_size_one_move() {
    let device = ferrospeed_cpu::with_threads(1);
    let x = tensor(&numbers(24), DType::F32, &device).view([1, 4, 1, 6]).unwrap();
    let y = ops::permute(&x, &[1, 2, 0, 3]).unwrap();
    assert_eq!(y.sizes(), [4, 1, 1, 6]);
    assert_eq!(x.host::<f32>().unwrap().as_ptr(), y.host::<f32>().unwrap().as_ptr());
    let z = ops::permute(&x, &[3, 2, 0, 1]).unwrap();
    assert_ne!(x.host::<f32>().unwrap().as_ptr(), z.host::<f32>().unwrap().as_ptr());
}

#[test]
fn strided_copies_touch_their_blocks_alone() {
    for device in devices() {
        for dtype in TYPES {
            for [rows, width, from, from_stride, to, to_stride] in [
                [1, 5, 3, 9, 2, 7],
                [3, 16, 0, 32, 16, 48],
                [3, 16, 1, 32, 16, 48],
                [4, 7, 2, 11, 5, 13],
                [5, 12, 4, 12, 8, 20],
                [6, 8, 0, 8, 0, 8],
                [2, 0, 0, 4, 0, 4],
                [0, 4, 0, 4, 0, 4],
                [300, 33, 7, 40, 3, 35],
            ] {
                let all = numbers(from + rows * from_stride + width);
                let source = tensor(&all, dtype, &device);
                let mut expected = vec![255; to + rows * to_stride + width];
                let mut target = tensor(&expected, dtype, &device);
                for row in 0..rows {
                    let place = to + row * to_stride;
                    expected[place..place + width].copy_from_slice(&all[from + row * from_stride..][..width]);
                }
                let out = target.out().unwrap();
                let backend = device.backend();
                backend.copy_blocks(&source, from, from_stride, out, to, to_stride, rows, width).unwrap();
                let what = format!("{dtype}, {rows} rows of {width} on {}", backend.name());
                assert!(values(&target) == expected, "{what}");
            }
        }
    }
}
