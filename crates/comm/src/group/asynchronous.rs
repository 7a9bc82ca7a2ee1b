//! The asynchronous operations, on regions, and their coalesced forms.
//!
//! Each returns at once with a [`Work`]; an argument that cannot be right shows when the work is waited for. See
//! [`Region`] for what may be touched while an operation is in flight. For a blocking operation on regions, wait at once.

use std::panic::Location;

use super::{Call, Group};
use crate::backend::Message;
use crate::dtype::{DType, ReduceOp};
use crate::lane::Work;
use crate::op::{Collective, Kind};
use crate::region::Region;

impl Group {
    /// Starts an [`all_reduce`](Group::all_reduce) in place.
    #[track_caller]
    pub fn all_reduce_async(&self, data: &Region, dtype: DType, op: ReduceOp) -> Work {
        self.all_reduce_coalesced(std::slice::from_ref(data), dtype, op)
    }

    /// As [`all_reduce_async`](Group::all_reduce_async), once `first` is done: the second half of a reduction in two levels.
    /// Its place among this group's operations is taken now, so ranks agree on the order whenever the first half ends.
    #[track_caller]
    pub fn all_reduce_after(&self, first: &Work, data: &Region, dtype: DType, op: ReduceOp) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        let operation = call.operation(Kind::AllReduce, Some(op), None, [Call::in_place(data)]);
        let first = first.clone();
        self.start_after(move || first.wait(), Ok(operation))
    }

    /// Starts an all_reduce of a list of buffers as one operation.
    #[track_caller]
    pub fn all_reduce_coalesced(&self, data: &[Region], dtype: DType, op: ReduceOp) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(Ok(call.operation(Kind::AllReduce, Some(op), None, data.iter().map(Call::in_place))))
    }

    /// Starts a [`reduce`](Group::reduce) in place.
    #[track_caller]
    pub fn reduce_async(&self, data: &Region, dtype: DType, op: ReduceOp, root: usize) -> Work {
        self.reduce_coalesced(std::slice::from_ref(data), dtype, op, root)
    }

    /// Starts a reduce of a list of buffers as one operation.
    #[track_caller]
    pub fn reduce_coalesced(&self, data: &[Region], dtype: DType, op: ReduceOp, root: usize) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(Ok(call.operation(Kind::Reduce, Some(op), Some(root), data.iter().map(Call::in_place))))
    }

    /// Starts a [`reduce_scatter`](Group::reduce_scatter). The output may be this rank's part of the input.
    #[track_caller]
    pub fn reduce_scatter_async(&self, input: &Region, output: &Region, dtype: DType, op: ReduceOp) -> Work {
        self.reduce_scatter_coalesced(&[(input.clone(), output.clone())], dtype, op)
    }

    /// Starts a reduce_scatter of a list of `(input, output)` as one operation.
    #[track_caller]
    pub fn reduce_scatter_coalesced(&self, pairs: &[(Region, Region)], dtype: DType, op: ReduceOp) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.reduce_scatter(op, pairs))
    }

    /// Starts a [`reduce_scatter_unequal`](Group::reduce_scatter_unequal).
    #[track_caller]
    pub fn reduce_scatter_unequal_async(
        &self,
        input: &Region,
        output: &Region,
        counts: &[usize],
        dtype: DType,
        op: ReduceOp,
    ) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.reduce_scatter_unequal(op, input.clone(), output.clone(), counts))
    }

    /// Starts an [`all_gather`](Group::all_gather). The input may be this rank's part of the output.
    #[track_caller]
    pub fn all_gather_async(&self, input: &Region, output: &Region, dtype: DType) -> Work {
        self.all_gather_coalesced(&[(input.clone(), output.clone())], dtype)
    }

    /// Starts an all_gather of a list of `(input, output)` as one operation.
    #[track_caller]
    pub fn all_gather_coalesced(&self, pairs: &[(Region, Region)], dtype: DType) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.all_gather(pairs))
    }

    /// The same for buffers that are alike and yet not the same thing: ranks whose `identity` differs disagree, even where
    /// all sizes agree.
    #[track_caller]
    pub fn all_gather_identified(&self, pairs: &[(Region, Region)], dtype: DType, identity: u64) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.all_gather(pairs).map(|operation| Collective { identity, ..operation }))
    }

    /// Starts an [`all_gather_unequal`](Group::all_gather_unequal).
    #[track_caller]
    pub fn all_gather_unequal_async(
        &self,
        input: &Region,
        output: &Region,
        counts: &[usize],
        dtype: DType,
    ) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.all_gather_unequal(input.clone(), output.clone(), counts))
    }

    /// Starts a [`broadcast`](Group::broadcast).
    #[track_caller]
    pub fn broadcast_async(&self, data: &Region, dtype: DType, root: usize) -> Work {
        self.broadcast_coalesced(std::slice::from_ref(data), dtype, root)
    }

    /// Starts a broadcast of a list of buffers as one operation.
    #[track_caller]
    pub fn broadcast_coalesced(&self, data: &[Region], dtype: DType, root: usize) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(Ok(call.operation(Kind::Broadcast, None, Some(root), data.iter().map(Call::in_place))))
    }

    /// Starts a [`scatter`](Group::scatter).
    #[track_caller]
    pub fn scatter_async(&self, input: Option<&Region>, output: &Region, dtype: DType, root: usize) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.scatter(input.cloned(), output.clone(), root))
    }

    /// Starts a [`gather`](Group::gather).
    #[track_caller]
    pub fn gather_async(&self, input: &Region, output: Option<&Region>, dtype: DType, root: usize) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.gather(input.clone(), output.cloned(), root))
    }

    /// Starts an [`all_to_all`](Group::all_to_all).
    #[track_caller]
    pub fn all_to_all_async(&self, input: &Region, output: &Region, dtype: DType) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.all_to_all(input.clone(), output.clone()))
    }

    /// Starts an [`all_to_all_unequal`](Group::all_to_all_unequal).
    #[track_caller]
    pub fn all_to_all_unequal_async(
        &self,
        input: &Region,
        output: &Region,
        send_counts: &[usize],
        recv_counts: &[usize],
        dtype: DType,
    ) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        self.start(call.all_to_all_unequal(input.clone(), output.clone(), send_counts, recv_counts))
    }

    /// As [`all_to_all_unequal_async`](Group::all_to_all_unequal_async), once `first` is done and `prepare` has made the
    /// input of what it brought: the second hop of an exchange in two. Its place among this group's operations is taken
    /// now, as that of [`all_reduce_after`](Group::all_reduce_after).
    #[track_caller]
    pub fn all_to_all_unequal_after(
        &self,
        first: &Work,
        prepare: impl FnOnce() + Send + 'static,
        [input, output]: [&Region; 2],
        [send_counts, recv_counts]: [&[usize]; 2],
        dtype: DType,
    ) -> Work {
        let call = Call::new(self, dtype, Location::caller());
        let first = first.clone();
        let before = move || first.wait().map(|()| prepare());
        let operation = call.all_to_all_unequal(input.clone(), output.clone(), send_counts, recv_counts);
        self.start_after(before, operation)
    }

    /// Starts a [`send`](Group::send).
    #[track_caller]
    pub fn send_async(&self, data: &Region, dtype: DType, to: usize, tag: u64) -> Work {
        let message = Message { kind: Kind::Send, peer: to, tag, dtype, region: data.clone() };
        self.start_message(message, Location::caller())
    }

    /// Starts a [`recv`](Group::recv).
    #[track_caller]
    pub fn recv_async(&self, data: &Region, dtype: DType, from: usize, tag: u64) -> Work {
        let message = Message { kind: Kind::Recv, peer: from, tag, dtype, region: data.clone() };
        self.start_message(message, Location::caller())
    }

    /// Starts a [`barrier`](Group::barrier).
    #[track_caller]
    pub fn barrier_async(&self) -> Work {
        self.start(Ok(Call::new(self, DType::U8, Location::caller()).barrier()))
    }
}
