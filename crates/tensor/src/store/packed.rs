//! Weights of few bits where they are wanted, whole ones elsewhere.
//!
//! Made for reading alone: a linear layer multiplies by the packed bytes, any other reader gets the weight back in full for as
//! long as it reads. Gradients are refused.

use std::sync::Arc;

use crate::backend::Device;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::WeightLayout;
use crate::packed::{PackedBits, PackedWeight, Packing};
use crate::param::{Param, ParamStore, StoreError};
use crate::store::{ParamSource, PlainStore};
use crate::tensor::Tensor;

enum Held {
    /// The place in the store of whole weights.
    Whole(usize),
    Packed(Arc<PackedWeight>, WeightLayout),
}

/// The store.
pub struct PackedStore {
    whole: PlainStore,
    held: Vec<Held>,
    dtype: DType,
    device: Device,
}

impl PackedStore {
    /// Fills a store from `source` and attaches the parameters; `packing_of` says which of them are packed.
    pub fn attach(
        params: &[Param],
        dtype: DType,
        device: &Device,
        source: &dyn ParamSource,
        packing_of: impl Fn(&Param) -> Option<Packing>,
    ) -> Result<Arc<PackedStore>> {
        let (mut whole, mut held) = (Vec::new(), Vec::new());
        for param in params {
            match packing_of(param) {
                Some(packing) => {
                    let backend = device.backend();
                    if !backend.takes_packed(packing.bits) {
                        return Err(TensorError::argument("packed weight", not_taken(packing.bits, device)));
                    }
                    let weight = Arc::new(PackedWeight::load(param, packing, source)?);
                    if !backend.is_host() {
                        weight.on(device)?;
                    }
                    held.push(Held::Packed(weight, packing.layout));
                }
                None => {
                    held.push(Held::Whole(whole.len()));
                    whole.push(param.clone());
                }
            }
        }
        let whole = PlainStore::detached(&whole, dtype, device, source)?;
        let store = Arc::new(PackedStore { whole, held, dtype, device: device.clone() });
        for (index, param) in params.iter().enumerate() {
            param.attach(store.clone(), index, dtype)?;
        }
        Ok(store)
    }

    /// Bytes of all weights.
    pub fn size_bytes(&self) -> usize {
        let packed = self.held.iter().map(|held| match held {
            Held::Whole(_) => 0,
            Held::Packed(weight, _) => weight.size_bytes(),
        });
        packed.sum::<usize>() + self.whole.flat().size_bytes()
    }
}

fn not_taken(bits: PackedBits, device: &Device) -> String {
    let wanted = match bits {
        PackedBits::Float8 => "a GPU of compute capability 8.9 (Ada, Hopper) or newer; take int8 elsewhere",
        PackedBits::Eight | PackedBits::Four => {
            "a GPU of compute capability 8.0 (Ampere) or newer, or the processor"
        }
    };
    format!("{device:?} has no products with weights in {}: they need {wanted}", bits.name())
}

impl ParamStore for PackedStore {
    fn acquire(&self, index: usize) -> Result<Tensor, StoreError> {
        match &self.held[index] {
            Held::Whole(place) => self.whole.acquire(*place),
            Held::Packed(weight, layout) => {
                let [outputs, inputs] = [weight.outputs(), weight.inputs()];
                let mut all = vec![0.0f32; outputs * inputs];
                all.chunks_mut(inputs).enumerate().for_each(|(row, out)| weight.unpack_row(row, out));
                let shape = match layout {
                    WeightLayout::OutIn => [outputs, inputs],
                    WeightLayout::InOut => {
                        all =
                            (0..inputs * outputs).map(|i| all[i % outputs * inputs + i / outputs]).collect();
                        [inputs, outputs]
                    }
                };
                Ok(Tensor::from_f32(&all, shape, self.dtype, &self.device)?)
            }
        }
    }

    fn release(&self, _index: usize) {}

    fn packed(&self, index: usize) -> Option<Arc<PackedWeight>> {
        match &self.held[index] {
            Held::Whole(_) => None,
            Held::Packed(weight, _) => Some(Arc::clone(weight)),
        }
    }

    fn push_grad(&self, _index: usize, _gradient: Tensor) -> Result<(), StoreError> {
        Err("packed weights are for reading; train the whole ones".into())
    }
}
