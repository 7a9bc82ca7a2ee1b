//! Layer norm and RMS norm: `kernels/norm.cu`.

use ferrospeed_tensor::backend::Norms;
use ferrospeed_tensor::{DType, NormKind, Out, Result, Tensor};

use crate::{CudaBackend, Kernel, Source, at, at_option, launch, real, reduce};

/// Rows up to this width of 16-bit values are taken by a warp each in backward, which then waits for no other.
const WARP_WIDTH: usize = 1024;
/// Such warps in a block.
const WARPS: u32 = 4;

/// How a row is spread over threads.
struct Shape {
    threads: u32,
    /// How many packs of eight each thread holds; `None` when a row does not stay in registers.
    packs: Option<&'static str>,
    /// How many rows a block works on at a time.
    teams: u32,
}

impl Shape {
    fn new(width: usize, operands: &[u64]) -> Shape {
        let aligned = width.is_multiple_of(8) && operands.iter().all(|address| address.is_multiple_of(16));
        let threads = width.div_ceil(8).next_multiple_of(32).clamp(32, 512);
        let packs = match width.div_ceil(8).div_ceil(threads) {
            _ if !aligned => None,
            0 | 1 => Some("PACKS=1"),
            2 => Some("PACKS=2"),
            3 | 4 => Some("PACKS=4"),
            _ => None,
        };
        Shape { threads: threads as u32, packs, teams: 1 }
    }

    /// The same in backward.
    fn backward(width: usize, dtype: DType, operands: &[u64]) -> Shape {
        let shape = Shape::new(width, operands);
        let packs = match width.div_ceil(256) {
            _ if shape.packs.is_none() || width > WARP_WIDTH || dtype.size_bytes() != 2 => return shape,
            0 | 1 => "PACKS=1",
            2 => "PACKS=2",
            3 => "PACKS=3",
            _ => "PACKS=4",
        };
        Shape { threads: 32, packs: Some(packs), teams: WARPS }
    }

    /// How many blocks a multiprocessor has room for.
    fn resident(&self) -> usize {
        match (self.teams, self.packs) {
            (1, _) => (1024 / self.threads).clamp(1, 10) as usize,
            (_, Some("PACKS=4")) => 3,
            _ => 4,
        }
    }

    fn kernel(&self, dtype: DType, held: &'static str, any: &'static str) -> Result<Kernel> {
        let teams = if self.teams == 1 { "TEAMS=1" } else { "TEAMS=4" };
        let defines = [real("norm", dtype)?, self.packs.unwrap_or("PACKS=1"), teams];
        Ok(Kernel { source: Source::Norm, defines, name: if self.packs.is_some() { held } else { any } })
    }
}

fn kind_number(kind: NormKind) -> i32 {
    match kind {
        NormKind::Layer => 0,
        NormKind::Rms => 1,
    }
}

pub(super) fn norm(
    backend: &CudaBackend,
    kind: NormKind,
    eps: f32,
    x: &Tensor,
    residual: Option<(&Tensor, &Tensor)>,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    y: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<()> {
    let (rows, width) = (x.shape().rows(), x.shape().last());
    if x.numel() == 0 {
        return Ok(());
    }
    let (residual, sum) = residual.map_or((0, 0), |(residual, sum)| (at(residual), at(sum)));
    let (w, b) = (at_option(weight), at_option(bias));
    let shape = Shape::new(width, &[at(x), residual, sum, w, b, at(y)]);
    let kernel = shape.kernel(x.dtype(), "norm_forward", "norm_forward_any")?;
    launch!(
        @ shape.packs.is_some(),
        backend,
        kernel,
        [rows as u32, 1, 1],
        [shape.threads, 1, 1],
        0,
        width as u64,
        kind_number(kind),
        eps,
        at(x),
        residual,
        sum,
        w,
        b,
        at(y),
        at(mean),
        at(rstd)
    )
}

impl Norms for CudaBackend {
    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: &Tensor,
        residual: Option<(&Tensor, Out<'_>)>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        y: Out<'_>,
        mean: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<()> {
        let residual = residual.map(|(residual, sum)| (residual, sum.into_tensor()));
        norm(
            self,
            kind,
            eps,
            x,
            residual,
            weight,
            bias,
            y.into_tensor(),
            mean.into_tensor(),
            rstd.into_tensor(),
        )
    }

    fn norm_backward(
        &self,
        kind: NormKind,
        x: &Tensor,
        weight: Option<&Tensor>,
        mean: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        dx: Out<'_>,
        dweight: Option<Out<'_>>,
        dbias: Option<Out<'_>>,
    ) -> Result<()> {
        let dx = dx.into_tensor();
        let dweight = dweight.map(Out::into_tensor);
        let dbias = dbias.map(Out::into_tensor);
        let (rows, width) = (x.shape().rows(), x.shape().last());
        if x.numel() == 0 {
            return Ok(());
        }
        let (w, more) = (at_option(weight), at_option(dsum));
        let shape = Shape::backward(width, x.dtype(), &[at(x), w, at(dy), more, at(dx)]);
        let kernel = shape.kernel(x.dtype(), "norm_backward", "norm_backward_any")?;
        // Each block leaves one row of partial sums: as many blocks as run at once, no more.
        let blocks = (self.driver.multiprocessors as usize * shape.resident())
            .min(rows.div_ceil(shape.teams as usize));
        let shared_bytes = if shape.teams > 1 { shape.teams * width as u32 * 4 } else { 0 };
        let bytes = blocks * width * 4;
        let partial = |wanted: Option<&Tensor>| wanted.map(|_| self.scratch(bytes)).transpose();
        let (weight_parts, bias_parts) = (partial(dweight)?, partial(dbias)?);
        let address = |parts: &Option<super::Scratch<'_>>| parts.as_ref().map_or(0, super::Scratch::address);
        let (dw, db) = (address(&weight_parts), address(&bias_parts));
        launch!(
            @ shape.packs.is_some(),
            self,
            kernel,
            [blocks as u32, 1, 1],
            [shape.threads, shape.teams, 1],
            shared_bytes,
            rows as u64,
            width as u64,
            kind_number(kind),
            at(x),
            w,
            at(mean),
            at(rstd),
            at(dy),
            more,
            at(dx),
            dw,
            db
        )?;
        let sums: Vec<(u64, &Tensor)> = [(dw, dweight), (db, dbias)]
            .into_iter()
            .filter_map(|(parts, target)| Some((parts, target?)))
            .collect();
        reduce::finish_rows(self, blocks, width, &sums)
    }
}
