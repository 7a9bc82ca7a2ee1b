//! Matrix products: bf16 on AMX where the processor has it; f32 on AMX too, in three pieces, where the product is large; else
//! with AVX-512, where 16-bit values are widened while they are packed, or bf16 multiplied in pairs; else by the `gemm` crate, which gets them from
//! `widened.rs`; a single row by `one_row.rs`, and rows that must not know of each other by `rows_alone.rs`, where they do
//! not go through tiles of bf16, which keep rows apart anyway.
//!
//! The result is cut into tiles by its shape alone; each tile is one task. So the sums are grouped the same way
//! with any number of threads. They are grouped differently on another instruction set.

use std::ops::Range;

use ferrospeed_tensor::backend::{Gemm, Matrix, Products, Screen};
use ferrospeed_tensor::dtype::{Element, Float};
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::rows_alone::are_rows_alone;
use ferrospeed_tensor::{Activation, DType, Result, Tensor, TensorError};
use half::{bf16, f16};

use crate::parallel::Shared;
use crate::pool::HostPool;
use crate::{CpuBackend, activation, screen};
#[cfg(target_arch = "x86_64")]
use crate::{amx, avx512};
use crate::{float_kernel, read, rows_alone, widened};

/// Rows and columns of one task's part of the result.
const TILE: usize = 512;
/// f32 products of fewer rows, columns or `k` do not pay for being brought into tiles.
#[cfg(target_arch = "x86_64")]
const SPLIT_LEAST: usize = 128;
/// `k` of an f32 product that goes through tiles at once, at most.
#[cfg(target_arch = "x86_64")]
const SPLIT_DEPTH: usize = 1024;
/// Elements of a left operand that are in pieces at once: about this many, and a multiple of [`SPLIT_ROWS`] rows.
#[cfg(target_arch = "x86_64")]
const SPLIT_ELEMENTS: usize = 1 << 20;
#[cfg(target_arch = "x86_64")]
const SPLIT_ROWS: usize = 1024;

/// An operand as the kernels see it: element (row, column) lies at `row·row_stride + column·column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, T> {
    pub(crate) elements: &'a [T],
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a, T: Element> Operand<'a, T> {
    pub(crate) fn new(matrix: &Matrix<'a>, batch: usize) -> Self {
        let elements = &read::<T>(matrix.tensor)[matrix.offset + batch * matrix.batch_stride..];
        let (row_stride, column_stride) =
            if matrix.transposed { (1, matrix.row_stride) } else { (matrix.row_stride, 1) };
        Operand { elements, row_stride, column_stride }
    }

    #[inline(always)]
    pub(crate) fn index(&self, row: usize, column: usize) -> usize {
        row * self.row_stride + column * self.column_stride
    }
}

/// What happens to a finished row segment of the product before it is stored.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'a> {
    pub(crate) alpha: f32,
    pub(crate) accumulate: bool,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) activation: Option<Activation>,
}

impl Epilogue<'_> {
    fn is_plain(&self) -> bool {
        self.bias.is_none() && self.activation.is_none()
    }

    /// Whether the result is the sums and nothing else, before a bias and an activation.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn is_fresh(&self) -> bool {
        self.alpha == 1.0 && !self.accumulate
    }

    /// Whether anything is left to do once sums are in the result, scaled and added.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn finishes<C>(&self, output: &Output<C>) -> bool {
        !self.is_plain() || output.before.is_some()
    }

    /// [`Epilogue::store`], whatever the type of the result.
    pub(crate) fn store_any(&self, sums: &mut [f32], stride: usize, part: Part, output: &AnyOutput) {
        match output {
            AnyOutput::F32(output) => self.store(sums, stride, part, output),
            AnyOutput::BF16(output) => self.store(sums, stride, part, output),
            AnyOutput::F16(output) => self.store(sums, stride, part, output),
        }
    }

    /// Stores sums, in rows that begin `stride` apart, to a part of the result. It belongs to the caller.
    pub(crate) fn store<C: Float>(&self, sums: &mut [f32], stride: usize, part: Part, output: &Output<C>) {
        let Part { rows, columns } = part;
        vectorized!(|| for (row, sums) in rows.zip(sums.chunks_mut(stride)) {
            // SAFETY: passed on to the caller.
            let (c, before) = unsafe { output.row(row, columns.clone()) };
            self.store_row(&mut sums[..columns.len()], columns.start, c, before);
        });
    }

    /// Stores `sums`, the product for columns `first..` of one row, to `c`, and the value before the activation.
    #[inline(always)]
    pub(crate) fn store_row<C: Float>(
        &self,
        sums: &mut [f32],
        first: usize,
        c: &mut [C],
        before: Option<&mut [C]>,
    ) {
        if self.alpha != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= self.alpha);
        }
        if self.accumulate {
            sums.iter_mut().zip(c.iter()).for_each(|(sum, c)| *sum += c.widen());
        }
        if let Some(bias) = self.bias {
            sums.iter_mut().zip(&bias[first..]).for_each(|(sum, bias)| *sum += bias);
        }
        c.iter_mut().zip(sums.iter()).for_each(|(c, sum)| *c = C::narrow(*sum));
        if let Some(before) = before {
            before.copy_from_slice(c);
        }
        if let Some(activation) = self.activation {
            // From the rounded value, which is what backward will see.
            activation::values(activation, c, sums);
            c.iter_mut().zip(sums.iter()).for_each(|(c, sum)| *c = C::narrow(*sum));
        }
    }
}

/// Rows and columns of a product.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

/// The result: rows of `C` with a stride, written by tiles.
#[derive(Clone, Copy)]
pub(crate) struct Output<C> {
    pub(crate) c: Shared<C>,
    pub(crate) before: Option<Shared<C>>,
    pub(crate) offset: usize,
    pub(crate) row_stride: usize,
}

impl<C> Output<C> {
    /// Whether a result of this many rows and columns lies inside.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn reaches(&self, rows: usize, columns: usize) -> bool {
        let end = self.offset + rows.saturating_sub(1) * self.row_stride + columns;
        rows == 0 || (end <= self.c.len() && self.before.as_ref().is_none_or(|before| end <= before.len()))
    }

    /// # Safety
    /// No other task touches these columns of this row.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "tasks write disjoint parts")]
    pub(crate) unsafe fn row(&self, row: usize, columns: Range<usize>) -> (&mut [C], Option<&mut [C]>) {
        let start = self.offset + row * self.row_stride;
        let span = start + columns.start..start + columns.end;
        // SAFETY: passed on to the caller.
        unsafe { (self.c.range(span.clone()), self.before.as_ref().map(|before| before.range(span))) }
    }
}

/// The result in its type: kernels that take it are compiled once for each type of operand, not for each pair of types.
pub(crate) enum AnyOutput {
    F32(Output<f32>),
    BF16(Output<bf16>),
    F16(Output<f16>),
}

impl AnyOutput {
    /// Where one product of a batch goes.
    pub(crate) fn of(gemm: &Gemm<'_>, product: usize) -> Self {
        match gemm.c.out.dtype() {
            DType::BF16 => AnyOutput::BF16(output(gemm, product)),
            DType::F16 => AnyOutput::F16(output(gemm, product)),
            // `check` lets no other type through.
            _ => AnyOutput::F32(output(gemm, product)),
        }
    }
}

impl Products for CpuBackend {
    fn gemm(&self, gemm: Gemm<'_>) -> Result<()> {
        let threads = &self.threads;
        let pool = &self.pool;
        let gemm = &gemm;
        check(gemm)?;
        if gemm.m == 0 || gemm.n == 0 || gemm.batch == 0 {
            return Ok(());
        }
        let bias = gemm.bias.map(|bias| bias.to_vec_f32()).transpose()?;
        let epilogue = Epilogue {
            alpha: gemm.alpha,
            accumulate: gemm.accumulate,
            bias: bias.as_deref(),
            activation: gemm.activation,
        };
        let alone = gemm.batch == 1 && are_rows_alone();
        #[cfg(target_arch = "x86_64")]
        if alone && tiles_keep_rows_alone(gemm) && gemm.m <= amx::few_rows::MOST_ROWS {
            return float_kernel!("gemm", gemm.c.out.dtype(), C => {
                amx::few_rows::product::<C>(threads, gemm, &epilogue, &output(gemm, 0));
            });
        }
        if (alone && !tiles_keep_rows_alone(gemm)) || (gemm.batch == 1 && gemm.m == 1) {
            return rows_alone::product(threads, gemm, &epilogue);
        }
        if gemm.a.tensor.dtype() == DType::F32 {
            // So is the result, as was checked.
            return products_f32(threads, pool, gemm, &epilogue);
        }
        match gemm.a.tensor.dtype() {
            #[cfg(target_arch = "x86_64")]
            DType::BF16 if amx::available() => float_kernel!("gemm", gemm.c.out.dtype(), C => {
                let problem = amx::Problem {
                    m: gemm.m,
                    n: gemm.n,
                    k: gemm.k,
                    batch: gemm.batch,
                    a: |batch| Operand::<bf16>::new(&gemm.a, batch),
                    b: |batch| Operand::<bf16>::new(&gemm.b, batch),
                    epilogue: &epilogue,
                    output: |batch| output::<C>(gemm, batch),
                    // Tiles hold every bf16 value.
                    instead: |_, _, _| {},
                };
                amx::products::<bf16, C, _, _, _, _>(threads, pool, &problem)?;
            }),
            #[cfg(target_arch = "x86_64")]
            DType::BF16 if avx512::has_pairs() => {
                avx512::products_16_bit::<avx512::Pairs>(threads, gemm, &epilogue);
                Ok(())
            }
            #[cfg(target_arch = "x86_64")]
            DType::BF16 if avx512::available() => {
                avx512::products_16_bit::<avx512::Wide<bf16>>(threads, gemm, &epilogue);
                Ok(())
            }
            #[cfg(target_arch = "x86_64")]
            DType::F16 if avx512::available() => {
                avx512::products_16_bit::<avx512::Wide<f16>>(threads, gemm, &epilogue);
                Ok(())
            }
            DType::BF16 => widened::products::<bf16>(threads, pool, gemm, &epilogue),
            _ => widened::products::<f16>(threads, pool, gemm, &epilogue),
        }
    }

    fn screen(&self, weight: &Tensor, examples: &Tensor) -> Result<Option<Box<dyn Screen>>> {
        Ok(Some(Box::new(screen::RowScreen::new(&self.threads, weight, examples)?)))
    }
}

/// Whether rows that must not know of each other go through tiles. These sum every row in an order that only `k` decides; few
/// rows have a kernel that does the same where weights lie as `[out, in]`. The number of rows has no say.
fn tiles_keep_rows_alone(gemm: &Gemm<'_>) -> bool {
    #[cfg(target_arch = "x86_64")]
    let tiles = amx::available();
    #[cfg(not(target_arch = "x86_64"))]
    let tiles = false;
    let fits = gemm.b.transposed && gemm.k > 0 && gemm.k.is_multiple_of(32);
    tiles && fits && gemm.a.tensor.dtype() == DType::BF16
}

/// Where one product of a batch goes.
fn output<C: Element>(gemm: &Gemm<'_>, batch: usize) -> Output<C> {
    Output {
        c: Shared::of(&gemm.c.out),
        before: gemm.before_activation.as_ref().map(Shared::of),
        offset: gemm.c.offset + batch * gemm.c.batch_stride,
        row_stride: gemm.c.row_stride,
    }
}

fn check(gemm: &Gemm<'_>) -> Result<()> {
    let [a, b, c] = [gemm.a.tensor.dtype(), gemm.b.tensor.dtype(), gemm.c.out.dtype()];
    if a != b || !a.is_float() || (c != a && c != DType::F32) {
        return Err(TensorError::argument("gemm", format!("cannot multiply {a} by {b} into {c}")));
    }
    let holds =
        |numel: usize, offset: usize, batch_stride: usize, row_stride: usize, rows: usize, columns: usize| {
            if rows == 0 || columns == 0 || gemm.batch == 0 {
                return true;
            }
            let last = offset + (gemm.batch - 1) * batch_stride + (rows - 1) * row_stride + (columns - 1);
            last < numel
        };
    let reach = |matrix: &Matrix<'_>, rows: usize, columns: usize| {
        let (rows, columns) = if matrix.transposed { (columns, rows) } else { (rows, columns) };
        holds(matrix.tensor.numel(), matrix.offset, matrix.batch_stride, matrix.row_stride, rows, columns)
    };
    let c = &gemm.c;
    if !reach(&gemm.a, gemm.m, gemm.k)
        || !reach(&gemm.b, gemm.k, gemm.n)
        || !holds(c.out.numel(), c.offset, c.batch_stride, c.row_stride, gemm.m, gemm.n)
    {
        return Err(TensorError::argument("gemm", format!("an operand lies outside its tensor: {gemm:?}")));
    }
    Ok(())
}

/// Runs `task(batch, rows, columns)` for every tile of every product.
pub(super) fn tiles(
    threads: &Threads,
    gemm: &Gemm<'_>,
    task: impl Fn(usize, Range<usize>, Range<usize>) + Send + Sync,
) {
    let (down, across) = (gemm.m.div_ceil(TILE), gemm.n.div_ceil(TILE));
    threads.run(gemm.batch * down * across, |index| {
        let (batch, tile) = (index / (down * across), index % (down * across));
        let (row, column) = (tile % down * TILE, tile / down * TILE);
        task(batch, row..(row + TILE).min(gemm.m), column..(column + TILE).min(gemm.n));
    });
}

fn products_f32(threads: &Threads, pool: &HostPool, gemm: &Gemm<'_>, epilogue: &Epilogue<'_>) -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if amx::available() && gemm.m.min(gemm.n).min(gemm.k) >= SPLIT_LEAST {
        return products_split(threads, pool, gemm, epilogue);
    }
    #[cfg(target_arch = "x86_64")]
    if avx512::available() {
        avx512::products(threads, gemm, epilogue, |batch| output(gemm, batch));
        return Ok(());
    }
    tiles(threads, gemm, |batch, rows, columns| {
        let (a, b) = (Operand::<f32>::new(&gemm.a, batch), Operand::<f32>::new(&gemm.b, batch));
        let output = output::<f32>(gemm, batch);
        if !epilogue.is_plain() {
            let output = AnyOutput::F32(output);
            return through_scratch(&a, &b, Part { rows, columns }, gemm.k, epilogue, &output);
        }
        let start = output.offset + rows.start * output.row_stride + columns.start;
        let target = output.c.pointer().wrapping_add(start);
        let (alpha, accumulate) = (epilogue.alpha, epilogue.accumulate);
        // SAFETY: `check` has proved that the operands reach m×k and k×n, and the result m×n; the tile belongs to this
        // task alone.
        unsafe {
            library(&a, &b, rows, columns, gemm.k, alpha, target, output.row_stride, accumulate);
        }
    });
    Ok(())
}

/// On tiles, in pieces; by AVX-512 where values have none. Goes on in parts of the batch, of the rows and of `k`, so that the
/// pieces of the left operand stay few.
#[cfg(target_arch = "x86_64")]
fn products_split(
    threads: &Threads,
    pool: &HostPool,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
) -> Result<()> {
    let depth = gemm.k.div_ceil(gemm.k.div_ceil(SPLIT_DEPTH));
    let rows = (SPLIT_ELEMENTS / depth).next_multiple_of(SPLIT_ROWS).min(gemm.m);
    let products = (SPLIT_ELEMENTS / (rows * depth)).clamp(1, gemm.batch);
    for batch in parts(gemm.batch, products) {
        for rows in parts(gemm.m, rows) {
            for span in parts(gemm.k, depth) {
                part_split(threads, pool, gemm, epilogue, [&batch, &rows, &span])?;
            }
        }
    }
    Ok(())
}

/// Some products of a batch, some of their rows, some of their `k`.
#[cfg(target_arch = "x86_64")]
fn part_split(
    threads: &Threads,
    pool: &HostPool,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
    [batch, rows, span]: [&Range<usize>; 3],
) -> Result<()> {
    let last = span.end == gemm.k;
    let epilogue = Epilogue {
        alpha: epilogue.alpha,
        accumulate: epilogue.accumulate || span.start > 0,
        bias: epilogue.bias.filter(|_| last),
        activation: epilogue.activation.filter(|_| last),
    };
    let a = |product| {
        let whole = Operand::<f32>::new(&gemm.a, batch.start + product);
        Operand { elements: &whole.elements[whole.index(rows.start, span.start)..], ..whole }
    };
    let b = |product| {
        let whole = Operand::<f32>::new(&gemm.b, batch.start + product);
        Operand { elements: &whole.elements[whole.index(span.start, 0)..], ..whole }
    };
    let output = |product| {
        let whole = output::<f32>(gemm, batch.start + product);
        let offset = whole.offset + rows.start * whole.row_stride;
        Output { offset, before: whole.before.filter(|_| last), ..whole }
    };
    let k = span.len();
    let problem = amx::Problem {
        m: rows.len(),
        n: gemm.n,
        k,
        batch: batch.len(),
        a,
        b,
        epilogue: &epilogue,
        output,
        instead: |product, rows, columns| {
            avx512::multiply::<avx512::Wide<f32>>(
                &a(product),
                &b(product),
                rows,
                columns,
                k,
                &epilogue,
                &output(product),
            );
        },
    };
    amx::products::<f32, f32, _, _, _, _>(threads, pool, &problem)
}

/// `0..length` in parts of `size`.
#[cfg(target_arch = "x86_64")]
fn parts(length: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).step_by(size).map(move |start| start..(start + size).min(length))
}

/// Multiplies a tile into f32 scratch and stores it through the epilogue.
pub(super) fn through_scratch(
    a: &Operand<'_, f32>,
    b: &Operand<'_, f32>,
    part: Part,
    k: usize,
    epilogue: &Epilogue<'_>,
    output: &AnyOutput,
) {
    let (rows, columns) = (part.rows.clone(), part.columns.clone());
    let width = columns.len();
    let mut sums = vec![0.0f32; rows.len() * width];
    into_slice(a, b, rows, columns, k, &mut sums, 1.0, false);
    epilogue.store_any(&mut sums, width, part, output);
}

/// `target = [target +] alpha · a[rows, :] · b[:, columns]` on one thread, by the library.
///
/// # Safety
/// The operands reach these rows, columns and `k`; the target's rows and columns belong to the caller.
unsafe fn library(
    a: &Operand<'_, f32>,
    b: &Operand<'_, f32>,
    rows: Range<usize>,
    columns: Range<usize>,
    k: usize,
    alpha: f32,
    target: *mut f32,
    target_stride: usize,
    accumulate: bool,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        // The library's kernels want the result column by column: they get the transposed product.
        gemm_f32::gemm::f32::get_gemm_fn()(
            columns.len(),
            rows.len(),
            k,
            target,
            target_stride as isize,
            1,
            accumulate,
            b.elements.as_ptr().add(if k == 0 { 0 } else { b.index(0, columns.start) }),
            b.row_stride as isize,
            b.column_stride as isize,
            a.elements.as_ptr().add(if k == 0 { 0 } else { a.index(rows.start, 0) }),
            a.row_stride as isize,
            a.column_stride as isize,
            1.0,
            alpha,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

/// `target = [target +] alpha · a[rows, :] · b[:, columns]` on one thread, into rows that follow each other.
fn into_slice(
    a: &Operand<'_, f32>,
    b: &Operand<'_, f32>,
    rows: Range<usize>,
    columns: Range<usize>,
    k: usize,
    target: &mut [f32],
    alpha: f32,
    accumulate: bool,
) {
    if rows.is_empty() || columns.is_empty() {
        return;
    }
    let width = columns.len();
    assert!(target.len() >= rows.len() * width);
    assert!(k == 0 || a.elements.len() > a.index(rows.end - 1, k - 1));
    assert!(k == 0 || b.elements.len() > b.index(k - 1, columns.end - 1));
    #[cfg(target_arch = "x86_64")]
    if avx512::available() {
        let (first_a, first_b) =
            if k == 0 { (0, 0) } else { (a.index(rows.start, 0), b.index(0, columns.start)) };
        let a = Operand { elements: &a.elements[first_a..], ..*a };
        let b = Operand { elements: &b.elements[first_b..], ..*b };
        let epilogue = Epilogue { alpha, accumulate, bias: None, activation: None };
        let output = Output { c: Shared::new(target), before: None, offset: 0, row_stride: width };
        return avx512::multiply::<avx512::Wide<f32>>(&a, &b, 0..rows.len(), 0..width, k, &epilogue, &output);
    }
    // SAFETY: as was asserted.
    unsafe { library(a, b, rows, columns, k, alpha, target.as_mut_ptr(), width, accumulate) };
}

/// A small f32 product for the attention kernels: `c = [c +] alpha·a·b`, contiguous `c`.
pub(crate) fn small(
    m: usize,
    n: usize,
    k: usize,
    a: &Operand<'_, f32>,
    b: &Operand<'_, f32>,
    c: &mut [f32],
    alpha: f32,
    accumulate: bool,
) {
    into_slice(a, b, 0..m, 0..n, k, c, alpha, accumulate);
}
