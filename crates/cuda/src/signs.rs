//! Values as signs of one size. See `kernels/signs.cu`.

use ferrospeed_tensor::backend::{Rounding, SignMessages, Signed};
use ferrospeed_tensor::{DType, Result, Tensor, TensorError};

use crate::table::{Entry, Table};
use crate::{BLOCK, CudaBackend, Kernel, Source, at, at_option, launch};

/// Bytes of a size before the signs it belongs to.
const SCALE_BYTES: usize = size_of::<f32>();
/// Signs per byte.
const PER_BYTE: usize = u8::BITS as usize;

/// Matches `Piece` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Piece {
    first: u64,
    count: u64,
    values: u64,
    scale: u64,
    given: u64,
    given_count: u64,
    received: u64,
    messages: u64,
    stretch: u64,
}

impl Entry for Piece {
    fn count(&self) -> u64 {
        self.count
    }
    fn set_first(&mut self, first: u64) {
        self.first = first;
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel { source: Source::Signs, defines: ["", "", ""], name }
}

fn expect(holds: bool, why: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(TensorError::argument("signs", why())) }
}

/// The address of the first rank's message of a tensor, of which each rank has a stretch.
fn message(messages: &SignMessages<'_>, at_byte: usize, stretch: usize) -> Result<u64> {
    let end = at_byte + SCALE_BYTES + stretch / PER_BYTE;
    let fits = messages.bytes.dtype() == DType::U8
        && messages.ranks > 0
        && messages.bytes.numel().is_multiple_of(messages.ranks.max(1))
        && stretch.is_multiple_of(PER_BYTE)
        && end <= messages.stride();
    expect(fits, || format!("a stretch of {stretch} values from byte {at_byte} on in {messages:?}"))?;
    Ok(at(messages.bytes) + at_byte as u64)
}

fn is_f32(tensor: &Tensor, numel: usize) -> bool {
    tensor.dtype() == DType::F32 && tensor.numel() >= numel
}

fn piece(
    rounding: &Rounding<'_>,
    received: Option<&SignMessages<'_>>,
    sent: &SignMessages<'_>,
) -> Result<Piece> {
    let Rounding { values, scale, given, at: at_byte } = *rounding;
    let (count, ranks) = (values.numel(), sent.ranks.max(1));
    let fits = is_f32(values, 1) && is_f32(scale, 1) && given.is_none_or(|given| is_f32(given, 0));
    let source = given.is_some() || received.is_some();
    expect(fits && source && count.is_multiple_of(ranks), || format!("{rounding:?} to {ranks} ranks"))?;
    let received = received.filter(|_| given.is_none());
    Ok(Piece {
        first: 0,
        count: count as u64,
        values: at(values),
        scale: at(scale),
        given: at_option(given),
        given_count: given.map_or(0, |given| given.numel().min(count)) as u64,
        received: received.map(|received| message(received, at_byte, count)).transpose()?.unwrap_or(0),
        messages: message(sent, at_byte, count / ranks)?,
        stretch: (count / ranks) as u64,
    })
}

pub(super) fn round(
    backend: &CudaBackend,
    tensors: &[Rounding<'_>],
    received: Option<SignMessages<'_>>,
    sent: SignMessages<'_>,
) -> Result<()> {
    if tensors.is_empty() {
        return Ok(());
    }
    let pieces = tensors.iter().map(|rounding| piece(rounding, received.as_ref(), &sent));
    let table = Table::new(backend, pieces.collect::<Result<Vec<_>>>()?)?;
    let parts = backend.scratch(size_of::<f64>() * table.chunks as usize)?;
    let senders = received.map_or(0, |received| received.ranks);
    let (memory, part, to_stride) = (table.memory.address(), parts.address(), sent.stride() as u64);
    launch!(
        backend,
        kernel("round_to_signs"),
        table.grid(backend),
        [BLOCK, 1, 1],
        0,
        memory,
        table.number,
        table.chunks,
        senders as u32,
        received.map_or(0, |received| received.stride() as u64),
        1.0f32 / senders.max(1) as f32,
        to_stride,
        part
    )?;
    launch!(
        backend,
        kernel("settle_scales"),
        [table.number, 1, 1],
        [BLOCK, 1, 1],
        0,
        memory,
        part,
        sent.ranks as u32,
        to_stride
    )
}

pub(super) fn take(backend: &CudaBackend, tensors: &[Signed<'_>], received: SignMessages<'_>) -> Result<()> {
    if tensors.is_empty() {
        return Ok(());
    }
    let piece = |signed: &Signed<'_>| {
        let Signed { values, stretch, at: at_byte } = *signed;
        let fits = is_f32(values, 0) && values.numel() <= stretch * received.ranks;
        expect(fits, || format!("{signed:?} from {} ranks", received.ranks))?;
        Ok(Piece {
            count: values.numel() as u64,
            values: at(values),
            received: message(&received, at_byte, stretch)?,
            stretch: stretch as u64,
            ..Piece::default()
        })
    };
    let pieces = tensors.iter().map(piece).collect::<Result<Vec<_>>>()?;
    let table = Table::new(backend, pieces)?;
    let (memory, stride) = (table.memory.address(), received.stride() as u64);
    launch!(
        backend,
        kernel("take_signs"),
        table.grid(backend),
        [BLOCK, 1, 1],
        0,
        memory,
        table.number,
        table.chunks,
        stride
    )
}
