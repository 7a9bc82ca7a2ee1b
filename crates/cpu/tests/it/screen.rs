//! The largest products that a screen finds are those of the whole product, to the bit, whatever the numbers are.

use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, Tensor};

fn normal(count: usize, stream: u32) -> Vec<f32> {
    let mut values = vec![0.0f32; count];
    RandomKey::new(21, stream).fill_normal(0, &mut values);
    values
}

fn whole_product(weight: &Tensor, x: &Tensor) -> Vec<f32> {
    let (rows, width) = (weight.sizes()[0], weight.sizes()[1]);
    let mut y = Tensor::empty([1, rows], x.dtype(), x.device()).unwrap();
    let (a, b) = (Matrix::whole(x), Matrix::transposed(weight));
    x.device().backend().gemm(Gemm::plain(1, rows, width, a, b, y.out().unwrap())).unwrap();
    y.to_vec_f32().unwrap()
}

/// Checks what a screen finds; gives how many rows it named, if it could tell.
fn check(what: &str, weight: &Tensor, examples: &Tensor, x: &Tensor, count: usize) -> Option<usize> {
    let backend = x.device().backend();
    let mut screen = backend.screen(weight, examples).unwrap().expect("the CPU has one");
    let found = screen.largest(weight, x, count).unwrap()?;
    let all = whole_product(weight, x);
    for (row, product) in &found {
        assert_eq!(product.to_bits(), all[*row].to_bits(), "{what}: row {row}, of {}", all[*row]);
    }
    assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "{what}: rows are in order");
    let mut named = vec![false; all.len()];
    found.iter().for_each(|(row, _)| named[*row] = true);
    let mut products: Vec<f32> = found.iter().map(|(_, product)| *product).collect();
    products.sort_by(|a, b| b.total_cmp(a));
    assert!(products.len() >= count, "{what}: {} rows for {count}", products.len());
    for (row, product) in all.iter().enumerate().filter(|(row, _)| !named[*row]) {
        assert!(
            *product < products[count - 1],
            "{what}: row {row} with {product} was left out of {products:?}"
        );
    }
    Some(found.len())
}

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
fn random_matrices_of_every_shape() {
    for threads in [1, 3] {
        let device = ferrospeed_cpu::with_threads(threads);
        for dtype in TYPES {
            for (rows, width) in [(1, 1), (7, 16), (1009, 50), (5003, 64), (2048, 257), (3001, 768)] {
                let weight: Vec<f32> = normal(rows * width, 1).iter().map(|w| 0.02 * w).collect();
                let weight = Tensor::from_f32(&weight, [rows, width], dtype, &device).unwrap();
                for stream in 2..6 {
                    let x = Tensor::from_f32(&normal(width, stream), [1, width], dtype, &device).unwrap();
                    let examples =
                        Tensor::from_f32(&normal(3 * width, 9), [1, 3, width], dtype, &device).unwrap();
                    for count in [1, 2, 5, 40] {
                        let what = format!("{dtype} {rows}×{width}, {count} largest of vector {stream}");
                        let named = check(&what, &weight, &examples, &x, count);
                        if rows > 1000 && count <= 5 {
                            assert!(named.is_some_and(|named| named <= rows / 20), "{what}: {named:?} named");
                        }
                    }
                }
            }
        }
    }
}

/// Hidden states of trained models have most of their length in common.
#[test]
fn examples_make_bounds_narrow_where_vectors_are_alike() {
    let device = ferrospeed_cpu::with_threads(2);
    let (rows, width) = (4001, 256);
    let weight: Vec<f32> = normal(rows * width, 1).iter().map(|w| 0.1 * w).collect();
    let weight = Tensor::from_f32(&weight, [rows, width], DType::F32, &device).unwrap();
    let common: Vec<f32> = normal(width, 2).iter().map(|value| 10.0 * value).collect();
    let vector = |stream| {
        let own = normal(width, stream);
        let values: Vec<f32> = common.iter().zip(own).map(|(common, own)| common + own).collect();
        Tensor::from_f32(&values, [1, width], DType::F32, &device).unwrap()
    };
    // What all vectors have in common says nothing of which row is the largest.
    let along = whole_product(&weight, &Tensor::from_f32(&common, [1, width], DType::F32, &device).unwrap());
    let square: f32 = common.iter().map(|value| value * value).sum();
    let flat: Vec<f32> = weight.to_vec_f32().unwrap();
    let flat: Vec<f32> = flat
        .chunks(width)
        .zip(along)
        .flat_map(|(row, along)| row.iter().zip(&common).map(move |(w, c)| w - along / square * c))
        .collect();
    let weight = Tensor::from_f32(&flat, [rows, width], DType::F32, &device).unwrap();
    let unlike = Tensor::from_f32(&normal(width, 7), [1, width], DType::F32, &device).unwrap();
    let with = check("alike", &weight, &vector(3), &vector(4), 1).expect("few rows are left");
    let without = check("not alike", &weight, &unlike, &vector(4), 1);
    assert!(without.is_none_or(|without| without > 4 * with), "{with} with examples, {without:?} without");
}

#[test]
fn equal_rows_are_all_named() {
    let device = ferrospeed_cpu::with_threads(2);
    let (rows, width) = (3001, 96);
    for dtype in TYPES {
        let best = normal(width, 3);
        let mut weight: Vec<f32> = normal(rows * width, 1).iter().map(|w| 0.1 * w).collect();
        let equal = [0, 5, 64, 1500, 3000];
        equal.iter().for_each(|row| weight[row * width..][..width].copy_from_slice(&best));
        let weight = Tensor::from_f32(&weight, [rows, width], dtype, &device).unwrap();
        let x = Tensor::from_f32(&best, [1, width], dtype, &device).unwrap();
        assert_eq!(check(&format!("{dtype} equal"), &weight, &x, &x, 1), Some(equal.len()));
    }
    // All of them: too many to gain anything.
    let weight = Tensor::full([rows, width], 0.5, DType::F32, &device).unwrap();
    let x = Tensor::from_f32(&normal(width, 3), [1, width], DType::F32, &device).unwrap();
    assert_eq!(check("all equal", &weight, &x, &x, 1), None);
}

#[test]
fn rows_that_differ_in_the_last_bit_are_told_apart() {
    let device = ferrospeed_cpu::with_threads(2);
    let (rows, width) = (2003, 160);
    let best = normal(width, 3);
    for dtype in TYPES {
        let mut weight: Vec<f32> = normal(rows * width, 1).iter().map(|w| 0.1 * w).collect();
        for row in 100..160 {
            weight[row * width..][..width].copy_from_slice(&best);
            let changed = &mut weight[row * width + row];
            *changed = f32::from_bits(changed.to_bits() ^ (1 << (row % 18)));
        }
        let weight = Tensor::from_f32(&weight, [rows, width], dtype, &device).unwrap();
        for count in [1, 7, 60] {
            let x = Tensor::from_f32(&best, [1, width], dtype, &device).unwrap();
            let named = check(&format!("{dtype} last bits"), &weight, &x, &x, count);
            assert!(named.is_some_and(|named| named <= 60), "{dtype}, {count}: {named:?} named");
        }
    }
}

#[test]
fn huge_tiny_and_zero_rows_in_one_matrix() {
    let device = ferrospeed_cpu::with_threads(2);
    let (rows, width) = (1201, 70);
    for dtype in [DType::F32, DType::BF16] {
        for stream in 0..20 {
            let mut weight = normal(rows * width, 30 + stream);
            for (row, line) in weight.chunks_mut(width).enumerate() {
                let power = [0, 20, -20, 39, -39, -45, -100, -130, 3][(row * 7 + stream as usize) % 9];
                let scale = if row % 11 == 0 { 0.0 } else { 2f32.powi(power) };
                line.iter_mut().for_each(|w| *w *= scale);
                // One large weight among small ones.
                if row % 13 == 0 {
                    line[row % width] = 2f32.powi(35);
                }
            }
            let weight = Tensor::from_f32(&weight, [rows, width], dtype, &device).unwrap();
            for scale in [1.0, 1e-10, 1e12, 1e-25, 1e30, 0.0] {
                let x: Vec<f32> = normal(width, 60 + stream).iter().map(|value| scale * value).collect();
                let x = Tensor::from_f32(&x, [1, width], dtype, &device).unwrap();
                for count in [1, 4, 30] {
                    check(&format!("{dtype} scales, {scale}, {stream}"), &weight, &x, &x, count);
                }
            }
        }
    }
}

#[test]
fn what_is_no_number_or_overflows_is_left_to_the_whole_product_or_found() {
    let device = ferrospeed_cpu::with_threads(2);
    let (rows, width) = (1000, 40);
    let plain = normal(rows * width, 1);
    let vector = normal(width, 2);
    let tensor =
        |values: &[f32], rows: usize| Tensor::from_f32(values, [rows, width], DType::F32, &device).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -1e30] {
        let mut weight = plain.clone();
        weight[500 * width + 3] = bad;
        weight[777 * width + 3] = -bad;
        let named = check(
            &format!("weight {bad}"),
            &tensor(&weight, rows),
            &tensor(&vector, 1),
            &tensor(&vector, 1),
            1,
        );
        assert_eq!(named.is_none(), bad.is_nan(), "{bad}: only NaN has no place in an order");
        let mut x = vector.clone();
        x[7] = bad;
        assert_eq!(check("vector", &tensor(&plain, rows), &tensor(&vector, 1), &tensor(&x, 1), 1), None);
        // Examples may be anything.
        let examples = tensor(&[x.clone(), vector.clone()].concat(), 2);
        assert!(check("examples", &tensor(&plain, rows), &examples, &tensor(&vector, 1), 1).is_some());
    }
}

#[test]
fn another_shape_or_type_than_it_was_made_of_is_refused() {
    let device = ferrospeed_cpu::with_threads(1);
    let tensor = |shape: [usize; 2], dtype| Tensor::full(shape, 1.0, dtype, &device).unwrap();
    let (weight, x) = (tensor([9, 16], DType::F32), tensor([1, 16], DType::F32));
    let mut screen = device.backend().screen(&weight, &x).unwrap().unwrap();
    for (weight, x) in [
        (tensor([8, 16], DType::F32), x.clone()),
        (weight.clone(), tensor([2, 16], DType::F32)),
        (weight.clone(), tensor([1, 16], DType::BF16)),
    ] {
        let error = screen.largest(&weight, &x, 1).unwrap_err().to_string();
        assert!(error.contains("screen of f32 [9, 16]"), "{error}");
    }
    assert!(device.backend().screen(&weight, &tensor([1, 8], DType::F32)).is_err());
    assert!(device.backend().screen(&weight, &tensor([1, 16], DType::BF16)).is_err());
}
