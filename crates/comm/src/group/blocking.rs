//! The blocking operations, on typed slices.

use std::panic::Location;
use std::time::Duration;

use super::{Call, Group, input_region, output_region};
use crate::backend::Message;
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::Result;
use crate::op::Kind;

// SAFETY of every block below: the region borrows a slice of the caller, and the call returns only when its operation is
// done, so the region does not outlive the borrow; inputs are regions that their operation only reads.
impl Group {
    /// Replaces `data` on every rank by the reduction over all ranks.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let part = Call::in_place(&unsafe { output_region(data) });
        self.run(call.operation(Kind::AllReduce, Some(op), None, [part]))
    }

    /// As [`Group::all_reduce`], on bytes of a type known at run time.
    #[track_caller]
    pub fn all_reduce_bytes(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let call = Call::new(self, dtype, Location::caller());
        // SAFETY: see above.
        let part = Call::in_place(&unsafe { output_region(data) });
        self.run(call.operation(Kind::AllReduce, Some(op), None, [part]))
    }

    /// Replaces `data` on `root` by the reduction over all ranks. The others' data stays as it is.
    #[track_caller]
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let part = Call::in_place(&unsafe { output_region(data) });
        self.run(call.operation(Kind::Reduce, Some(op), Some(root), [part]))
    }

    /// Gives rank `i` the `i`-th equal part of the reduction.
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let pair = unsafe { (input_region(input), output_region(output)) };
        self.run(call.reduce_scatter(op, &[pair])?)
    }

    /// As [`Group::reduce_scatter`], with `counts[i]` elements for rank `i`.
    #[track_caller]
    pub fn reduce_scatter_unequal<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let (input, output) = unsafe { (input_region(input), output_region(output)) };
        self.run(call.reduce_scatter_unequal(op, input, output, counts)?)
    }

    /// Gives every rank the inputs of all, in rank order.
    #[track_caller]
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let pair = unsafe { (input_region(input), output_region(output)) };
        self.run(call.all_gather(&[pair])?)
    }

    /// As [`Group::all_gather`], with `counts[i]` elements from rank `i`.
    #[track_caller]
    pub fn all_gather_unequal<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let (input, output) = unsafe { (input_region(input), output_region(output)) };
        self.run(call.all_gather_unequal(input, output, counts)?)
    }

    /// Gives every rank the data of `root`.
    #[track_caller]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let part = Call::in_place(&unsafe { output_region(data) });
        self.run(call.operation(Kind::Broadcast, None, Some(root), [part]))
    }

    /// Gives rank `i` the `i`-th equal part of the root's `input`, which only the root gives.
    #[track_caller]
    pub fn scatter<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let (input, output) = unsafe { (input.map(|input| input_region(input)), output_region(output)) };
        self.run(call.scatter(input, output, root)?)
    }

    /// Gives the root the inputs of all, in rank order, in `output`, which only the root gives.
    #[track_caller]
    pub fn gather<T: Element>(&self, input: &[T], output: Option<&mut [T]>, root: usize) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let (input, output) = unsafe { (input_region(input), output.map(|output| output_region(output))) };
        self.run(call.gather(input, output, root)?)
    }

    /// Gives rank `i` the `i`-th equal part of every rank's input, in rank order.
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let (input, output) = unsafe { (input_region(input), output_region(output)) };
        self.run(call.all_to_all(input, output)?)
    }

    /// As [`Group::all_to_all`], with `send_counts[i]` elements for rank `i` and `recv_counts[i]` from it.
    #[track_caller]
    pub fn all_to_all_unequal<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<()> {
        let call = Call::new(self, T::DTYPE, Location::caller());
        // SAFETY: see above.
        let (input, output) = unsafe { (input_region(input), output_region(output)) };
        self.run(call.all_to_all_unequal(input, output, send_counts, recv_counts)?)
    }

    /// Sends to a rank of the group. Returns once `data` may be changed, which may be before it is received.
    #[track_caller]
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: u64) -> Result<()> {
        // SAFETY: see above.
        let region = unsafe { input_region(data) };
        let message = Message { kind: Kind::Send, peer: to, tag, dtype: T::DTYPE, region };
        self.run_message(message, Location::caller())
    }

    /// Receives from a rank of the group the next message with this tag, which must have this length and type.
    #[track_caller]
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize, tag: u64) -> Result<()> {
        // SAFETY: see above.
        let region = unsafe { output_region(data) };
        let message = Message { kind: Kind::Recv, peer: from, tag, dtype: T::DTYPE, region };
        self.run_message(message, Location::caller())
    }

    /// Waits until every rank of the group is here.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.run(Call::new(self, DType::U8, Location::caller()).barrier())
    }

    /// As [`Group::barrier`], but gives up after `limit` and names who is missing.
    #[track_caller]
    pub fn barrier_within(&self, limit: Duration) -> Result<()> {
        let operation = Call::new(self, DType::U8, Location::caller()).barrier();
        self.inner.collectives.run(|| self.inner.execute(&operation, limit))
    }
}
