//! Who may be written to.

use std::ptr::NonNull;
use std::sync::Arc;

use ferrospeed_tensor::{Category, DType, Out, Tensor};

#[test]
fn memory_that_others_may_see_is_no_output() {
    let device = ferrospeed_cpu::device();
    let mut x = Tensor::zeros([6], DType::F32, &device).unwrap();
    let view = x.slice(2, [3]).unwrap();
    let refused = x.out().unwrap_err().to_string();
    assert!(refused.contains("seen through another handle"), "{refused}");
    assert!(Out::of_device(&x).is_err(), "the host's memory");
    drop(view);
    assert!(x.out().is_ok());
    let memory = Arc::new(vec![0f32; 4]);
    let address = NonNull::new(memory.as_ptr().cast_mut().cast()).unwrap();
    // SAFETY: four elements that live as long as their owner; nobody writes them.
    let mut external = unsafe {
        Tensor::from_external(address, [4], DType::F32, &device, Category::Buffers, memory.clone())
    };
    assert!(external.out().is_err(), "its owner may read");
}

#[test]
fn a_part_of_an_output_is_written_where_it_lies() {
    let device = ferrospeed_cpu::device();
    let mut x = Tensor::zeros([2, 3], DType::F32, &device).unwrap();
    device.backend().fill(x.out().unwrap().part(3, [3]).unwrap().out(), 2.0).unwrap();
    assert!(x.out().unwrap().part(4, [3]).is_err(), "outside");
    assert_eq!(x.host::<f32>().unwrap(), [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]);
}
