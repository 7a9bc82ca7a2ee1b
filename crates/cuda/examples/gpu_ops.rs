//! Times single ops on the GPU: `cargo run --release -p ferrospeed-tensor --example gpu_ops`.

use std::time::Instant;

use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::ops::{self, AttentionOptions, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, DType, Device, Out, Result, Tensor, autograd};

fn random(shape: &[usize], stream: u32, device: &Device) -> Result<Tensor> {
    let mut values = vec![0.0f32; shape.iter().product::<usize>().min(1 << 20)];
    RandomKey::new(1, stream).fill_normal(0, &mut values);
    let values: Vec<f32> = values.iter().copied().cycle().take(shape.iter().product()).collect();
    Tensor::from_f32(&values, shape, DType::BF16, device)
}

/// Median milliseconds of a call, over rounds of ten.
fn time(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..3 {
        work()?;
    }
    device.backend().synchronize()?;
    let mut rounds = Vec::new();
    for _ in 0..7 {
        let start = Instant::now();
        for _ in 0..10 {
            work()?;
        }
        device.backend().synchronize()?;
        rounds.push(start.elapsed().as_secs_f64() * 100.0);
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[3])
}

fn main() -> Result<()> {
    let device = ferrospeed_cuda::device(0, &ferrospeed_cpu::device())?;
    println!("{:?}", device);
    for [b, h, t, d] in [[32, 12, 1024, 64], [16, 16, 1024, 64], [8, 16, 1024, 128], [4, 16, 4096, 128]] {
        let [q, k, v, seed] = [1, 2, 3, 4].map(|stream| random(&[b, t, h, d], stream, &device));
        let (q, k, v, seed) = (q?.tracked(), k?.tracked(), v?.tracked(), seed?);
        let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let forward = time(&device, || ops::attention(&q, &k, &v, &options).map(drop))?;
        let both = time(&device, || {
            let out = ops::attention(&q.tracked(), &k.tracked(), &v.tracked(), &options)?;
            autograd::backward_with(&[(out, seed.clone())])
        })?;
        println!("attention {b}x{h}x{t}x{d}: forward {forward:.3} ms, with backward {both:.3} ms");
    }
    for megabytes in [1, 64, 1024] {
        let mut host = vec![1u8; megabytes << 20];
        let there = Tensor::empty([host.len()], DType::U8, &device)?;
        let write = time(&device, || device.backend().copy_from_host(&host, Out::of_device(&there)?))?;
        let read = time(&device, || device.backend().copy_to_host(&there, &mut host))?;
        let rate = |milliseconds: f64| host.len() as f64 / milliseconds / 1e6;
        println!("copy of {megabytes} MiB: in {:.1} GB/s, out {:.1} GB/s", rate(write), rate(read));
    }
    for [m, n, k] in
        [[32768, 2304, 768], [32768, 3072, 768], [32768, 768, 3072], [8192, 50304, 768], [8192, 8192, 2048]]
    {
        let (x, w, b) =
            (random(&[m, k], 1, &device)?, random(&[n, k], 2, &device)?, random(&[n], 3, &device)?);
        let tera = 2.0 * (m * n * k) as f64 / 1e9;
        let plain = time(&device, || ops::linear(&x, &w, None, WeightLayout::OutIn).map(drop))?;
        let bias = time(&device, || ops::linear(&x, &w, Some((&b).into()), WeightLayout::OutIn).map(drop))?;
        let gelu = time(&device, || {
            let bias = Some((&b).into());
            ops::linear_activation(&x, &w, bias, WeightLayout::OutIn, Some(Activation::GeluTanh)).map(drop)
        })?;
        let kept = time(&device, || {
            let bias = Some((&b).into());
            ops::linear_activation(x.tracked(), &w, bias, WeightLayout::OutIn, Some(Activation::GeluTanh))
                .map(drop)
        })?;
        println!(
            "product {m}x{n}x{k}: {plain:.3} ms ({:.0} TFLOP/s), bias {bias:.3}, gelu {gelu:.3}, gelu kept {kept:.3}",
            tera / plain
        );
    }
    for [m, n, k] in [[768, 2304, 32768], [768, 3072, 32768], [3072, 768, 32768], [2048, 8192, 8192]] {
        let (x, dy) = (random(&[k, m], 1, &device)?, random(&[k, n], 2, &device)?);
        let (dw, db) =
            (Tensor::empty([m, n], DType::BF16, &device)?, Tensor::empty([n], DType::BF16, &device)?);
        let plain =
            || Ok(Gemm::plain(m, n, k, Matrix::transposed(&x), Matrix::whole(&dy), Out::of_device(&dw)?));
        let alone = time(&device, || device.backend().gemm(plain()?))?;
        let sums = time(&device, || device.backend().sum_rows(&dy, Out::of_device(&db)?))?;
        println!("weight gradient {m}x{n}x{k}: {alone:.3} ms, sums {sums:.3}");
    }
    for (rows, width) in [(32768, 768), (16384, 1024), (8192, 2048)] {
        let (x, w, b) = (
            random(&[rows, width], 1, &device)?,
            random(&[width], 2, &device)?,
            random(&[width], 3, &device)?,
        );
        let r = random(&[rows, width], 4, &device)?;
        let seed = random(&[rows, width], 5, &device)?;
        let forward = time(&device, || {
            ops::add_layer_norm(&x, Some((&r).into()), Some((&w).into()), Some((&b).into()), 1e-5).map(drop)
        })?;
        let both = time(&device, || {
            let (w, b) = (w.tracked(), b.tracked());
            let (sum, y) = ops::add_layer_norm(
                x.tracked(),
                Some((&r.tracked()).into()),
                Some((&w).into()),
                Some((&b).into()),
                1e-5,
            )?;
            autograd::backward_with(&[(sum, seed.clone()), (y, seed.clone())])
        })?;
        let giga = (rows * width * 2) as f64 / 1e6;
        println!(
            "norm {rows}x{width}: forward {forward:.3} ms ({:.0} GB/s), with backward {both:.3} ms ({:.0} GB/s)",
            4.0 * giga / forward,
            8.0 * giga / both
        );
    }
    let x = random(&[32768, 3072], 1, &device)?;
    let out = Tensor::empty([3072], DType::BF16, &device)?;
    let rows = time(&device, || device.backend().sum_rows(&x, Out::of_device(&out)?))?;
    let y = x.tracked();
    let add = time(&device, || ops::add(&x, &x).map(drop))?;
    let gelu = time(&device, || {
        let (before, gradient) = (Out::of_device(&x)?, Out::of_device(&y)?);
        device.backend().activation_backward_in_place(Activation::GeluTanh, before, gradient)
    })?;
    let giga = x.size_bytes() as f64 / 1e6;
    println!(
        "sum_rows {rows:.3} ms ({:.0} GB/s), add {add:.3} ({:.0}), gelu backward {gelu:.3} ({:.0})",
        giga / rows,
        2.0 * giga / add,
        4.0 * giga / gelu
    );
    let ids: Vec<i64> = (0..32768i64).map(|i| (i * i * 7919 + i * 104_729) % 50304).collect();
    let ids = Tensor::from_slice(&ids, [32768], &device)?;
    let (table, dout) = (random(&[50304, 768], 1, &device)?, random(&[32768, 768], 2, &device)?);
    let forward = time(&device, || ops::embedding(&table, &ids).map(drop))?;
    let backward =
        time(&device, || device.backend().embedding_backward(&ids, &dout, Out::of_device(&table)?))?;
    println!("embedding forward {forward:.3} ms, backward {backward:.3} ms");
    let (x, w) = (random(&[32768, 768], 1, &device)?, random(&[50304, 768], 2, &device)?);
    let loss = time(&device, || {
        let loss = ops::linear_cross_entropy(
            x.tracked(),
            w.tracked(),
            WeightLayout::OutIn,
            &ids,
            ops::CrossEntropyOptions::default(),
        )?;
        autograd::backward(&loss)
    })?;
    println!("loss {loss:.3} ms ({:.0} TFLOP/s)", 6.0 * 32768.0 * 768.0 * 50304.0 / 1e9 / loss);
    Ok(())
}
