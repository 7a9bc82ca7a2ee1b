//! The same bits with portable, AVX2 and AVX-512 kernels and with tiles, for the ops whose arithmetic is defined to agree (all
//! but matrix products of floats; see docs/kernels.md). The level is chosen once per process, so each level gets a process.

use ferrospeed_testkit::child;

use ferrospeed_tensor::ops::{self, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::random::{self, RandomKey, RandomState};
use ferrospeed_tensor::store::{FromInitializers, PackedStore};
use ferrospeed_tensor::{
    Activation, DType, Device, Initializer, PackedBits, Packing, Param, Result, Tensor, autograd,
};

fn random_tensor(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Result<Tensor> {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(21, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device)
}

/// A number that changes with any bit of any result.
fn fingerprint() -> Result<u64> {
    let device = ferrospeed_cpu::with_threads(2);
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut mix = |tensor: &Tensor| -> Result<()> {
        for value in tensor.to_vec_f32()? {
            assert!(value.is_finite(), "{tensor:?} holds {value}");
            hash = (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for width in [1, 15, 16, 37, 300] {
            random::set_state(RandomState { seed: 4, step: 1, next_stream: 0 });
            let x = random_tensor(&[9, width], 1, dtype, &device)?.tracked();
            let [w, b] = [2, 3].map(|i| random_tensor(&[width], i, dtype, &device));
            let (w, b) = (w?.tracked(), b?.tracked());
            let normed = ops::layer_norm(&x, Some((&w).into()), Some((&b).into()), 1e-5)?;
            let rms = ops::rms_norm(&normed, Some((&w).into()), 1e-5)?;
            let gated = ops::gated(Activation::Silu, &rms, &normed)?;
            let mut y = ops::dropout(&gated, 0.25)?;
            for activation in
                [Activation::GeluErf, Activation::GeluTanh, Activation::QuickGelu, Activation::Tanh]
            {
                y = ops::add(&y, &ops::activate(&x, activation)?)?;
            }
            y = ops::add(&y, &ops::softmax(&x)?)?;
            mix(&y)?;
            let targets: Vec<i64> = (0..9).map(|i| i % width as i64).collect();
            let targets = Tensor::from_slice(&targets, [9], &device)?;
            let loss = ops::cross_entropy(
                &y,
                &targets,
                CrossEntropyOptions { label_smoothing: 0.1, ..Default::default() },
            )?;
            mix(&loss)?;
            autograd::backward(&loss)?;
            for leaf in [&x, &w, &b] {
                mix(&leaf.grad().expect("every leaf is used"))?;
            }
        }
    }
    // Products with weights of few bits, of which tiles take many rows.
    for (bits, rows) in
        [PackedBits::Eight, PackedBits::Four].into_iter().flat_map(|bits| [1, 8, 45].map(|rows| (bits, rows)))
    {
        let weight = Param::new("w", [70, 192], Initializer::Normal { mean: 0.0, std: 0.2 });
        let packing = Packing { bits, layout: WeightLayout::OutIn };
        let params = std::slice::from_ref(&weight);
        PackedStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }, |_| Some(packing))?;
        let x = random_tensor(&[rows, 192], 5, DType::F32, &device)?;
        mix(&autograd::no_grad(|| ops::linear(&x, &weight, None, WeightLayout::OutIn))?)?;
    }
    Ok(hash)
}

#[test]
fn print_fingerprint() {
    println!("bits={:016x}", fingerprint().unwrap());
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let of_level = |level: &str| -> String {
        let output = child::alone(module_path!(), "print_fingerprint")
            .env("FERROSPEED_CPU_KERNELS", level)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        child::assert_passed(&output);
        let bits = text.split("bits=").nth(1).and_then(|rest| rest.get(..16));
        bits.unwrap_or_else(|| panic!("{level} printed no bits: {text}")).to_owned()
    };
    let portable = of_level("portable");
    assert_eq!(portable, of_level("avx2"));
    assert_eq!(portable, of_level("avx512"));
    assert_eq!(portable, of_level("avx512_bf16"));
    assert_eq!(portable, of_level("the best there is"));
}
