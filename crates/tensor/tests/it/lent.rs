//! Places that a store lends for gradients.

use ferrospeed_tensor::{DType, Lent, Returned, Tensor, TensorError};

#[test]
fn a_lent_place_is_written_like_memory_of_its_own_and_comes_back() {
    let device = ferrospeed_cpu::device();
    let flat = Tensor::zeros([8], DType::F32, &device).unwrap();
    // SAFETY: nobody reads or writes the last four while they are lent.
    let (lent, loan) = unsafe { Lent::new(&flat.slice(4, [4]).unwrap(), 7) };
    let mut gradient = lent.into_tensor();
    device.backend().fill(gradient.out().unwrap(), 3.0).unwrap();
    assert!(loan.is_out());
    let Returned::Lent(back) = gradient.into_returned().unwrap() else { panic!("it was lent") };
    assert_eq!(back.param(), 7);
    drop(back);
    assert!(!loan.is_out());
    assert_eq!(flat.host::<f32>().unwrap(), [0.0, 0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0]);
}

#[test]
fn a_lent_place_that_is_dropped_is_free_again() {
    let flat = Tensor::zeros([4], DType::F32, &ferrospeed_cpu::device()).unwrap();
    // SAFETY: nobody else looks at it.
    let (lent, loan) = unsafe { Lent::new(&flat, 0) };
    let first = lent.into_tensor();
    let copy = first.clone();
    drop(first);
    assert!(loan.is_out(), "a handle is left");
    drop(copy);
    assert!(!loan.is_out());
}

#[test]
fn a_lent_place_that_somebody_still_sees_does_not_come_back() {
    let flat = Tensor::zeros([4], DType::F32, &ferrospeed_cpu::device()).unwrap();
    // SAFETY: nobody else looks at it.
    let (lent, _loan) = unsafe { Lent::new(&flat, 0) };
    let gradient = lent.into_tensor();
    let seen = gradient.clone();
    assert!(matches!(gradient.into_returned(), Err(TensorError::SharedOutput { .. })));
    drop(seen);
    let own = Tensor::zeros([4], DType::F32, &ferrospeed_cpu::device()).unwrap();
    assert!(matches!(own.into_returned(), Ok(Returned::Own(_))));
}
