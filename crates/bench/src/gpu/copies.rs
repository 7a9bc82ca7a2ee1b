//! `bench gpu --copies`: copies between page-locked memory of the host and the device, alone, both ways, and beside products.

use std::time::Instant;

use ferrospeed_tensor::beside::{Beside, Moment};
use ferrospeed_tensor::{Category, DType, Device, Result, Tensor, ops};
use serde_json::{Value, json};

/// Bytes of a copy.
const BYTES: usize = 256 << 20;
const COPIES: usize = 8;
/// Sides of the product.
const SIDE: usize = 8192;

/// Submits products that take about as long as the copies.
fn products(a: &Tensor, b: &Tensor) -> Result<()> {
    for _ in 0..40 {
        drop(ops::matmul(a, b)?);
    }
    Ok(())
}

/// Gigabytes per second each way, and how fast products run beside.
pub(super) fn measure(device: &Device) -> Result<Value> {
    let backend = device.backend();
    let room = || device.locked(BYTES, DType::U8, Category::Buffers);
    let locked = [room()?, room()?];
    let zeros = || Tensor::zeros([BYTES], DType::U8, device);
    let there = [zeros()?, zeros()?];
    let Some(now) = Moment::now(device)? else { return Ok(Value::Null) };
    let begin = |out: bool| {
        let (from, to) = if out { (&there[0], &locked[0]) } else { (&locked[1], &there[1]) };
        // SAFETY: nobody looks at what is copied.
        unsafe { Beside::begin(from, to, &now) }
    };
    let rate = |ways: &[bool]| -> Result<f64> {
        let mut best_s = f64::INFINITY;
        for _ in 0..3 {
            let began = Instant::now();
            let copies = (0..COPIES).flat_map(|_| ways.iter().map(|&out| begin(out)));
            copies.collect::<Result<Vec<_>>>()?.into_iter().try_for_each(Beside::wait)?;
            best_s = best_s.min(began.elapsed().as_secs_f64());
        }
        Ok((COPIES * BYTES) as f64 / best_s / 1e9)
    };
    let (out, into, both) = (rate(&[true])?, rate(&[false])?, rate(&[true, false])?);
    let tensor = || Tensor::full([SIDE, SIDE], 0.01, DType::BF16, device);
    let (a, b) = (tensor()?, tensor()?);
    let mut seconds = [f64::INFINITY; 2];
    for round in 0..8 {
        let beside = round % 2 == 1;
        backend.synchronize()?;
        let began = Instant::now();
        let copies: Vec<Beside> = match beside {
            true => (0..COPIES).flat_map(|_| [begin(true), begin(false)]).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        products(&a, &b)?;
        backend.synchronize()?;
        // The first two warm up.
        if round >= 2 {
            let slot = &mut seconds[usize::from(beside)];
            *slot = slot.min(began.elapsed().as_secs_f64());
        }
        copies.into_iter().try_for_each(Beside::wait)?;
    }
    Ok(json!({
        "case": "copies",
        "out_gb_per_s": out,
        "in_gb_per_s": into,
        "each_way_at_once_gb_per_s": both,
        "products_beside_copies": seconds[0] / seconds[1],
    }))
}
