//! cuDNN's graph interface, as little of it as attention needs: tensors, operations, a plan, its execution.
//!
//! The library is opened on first use and is optional. A graph is described once per shape; what the library's heuristic
//! offers first and can build is taken.

use std::ffi::c_void;

use cudarc::cudnn::sys;
use ferrospeed_tensor::Result;
use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendAttributeType_t as Type;
use sys::cudnnBackendDescriptorType_t as Kind;

use crate::driver::{Driver, failed};
pub(super) use sys::cudnnDataType_t as DataType;
pub(super) use sys::cudnnPointwiseMode_t as Pointwise;
pub(super) use sys::cudnnReduceTensorOp_t as Reduce;

const OP: &str = "cuDNN attention";

fn check(status: sys::cudnnStatus_t, what: &str) -> Result<()> {
    if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut message = [0u8; 512];
    // SAFETY: the buffer has the length that is given.
    unsafe { sys::cudnnGetLastErrorString(message.as_mut_ptr().cast(), message.len()) };
    let end = message.iter().position(|&byte| byte == 0).unwrap_or(message.len());
    Err(failed(OP, format!("{what}: {status:?} {}", String::from_utf8_lossy(&message[..end]))))
}

/// A backend descriptor, destroyed with this object.
struct Descriptor(sys::cudnnBackendDescriptor_t);

impl Descriptor {
    fn new(kind: Kind) -> Result<Descriptor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the place is valid for the handle.
        check(unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut raw) }, "create a descriptor")?;
        Ok(Descriptor(raw))
    }

    fn set<T>(&self, name: Name, kind: Type, values: &[T]) -> Result<()> {
        // SAFETY: the values have the type that `kind` says, as cuDNN documents it for the attribute.
        let status = unsafe {
            sys::cudnnBackendSetAttribute(self.0, name, kind, values.len() as i64, values.as_ptr().cast())
        };
        check(status, &format!("{name:?}"))
    }

    fn finish(self, what: &str) -> Result<Descriptor> {
        // SAFETY: the descriptor is ours.
        check(unsafe { sys::cudnnBackendFinalize(self.0) }, what)?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by us, used by nobody any more.
        unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

/// A handle of the library, bound to the device's stream.
pub(super) struct Handle {
    raw: sys::cudnnHandle_t,
    version: usize,
}

// SAFETY: a handle may move between threads; it is used under a lock.
unsafe impl Send for Handle {}

impl Handle {
    /// Opens the library; `None` where it is absent or older than version 9.
    pub(super) fn open(driver: &Driver) -> Option<Handle> {
        // SAFETY: opening the library runs its initialisers; the calls take valid places.
        unsafe {
            if !sys::is_culib_present() {
                return None;
            }
            let version = sys::cudnnGetVersion();
            if version < 90_000 {
                return None;
            }
            let mut handle = std::ptr::null_mut();
            check(sys::cudnnCreate(&mut handle), "create a handle").ok()?;
            check(sys::cudnnSetStream(handle, driver.stream().cast()), "set the stream").ok()?;
            Some(Handle { raw: handle, version })
        }
    }

    /// The library's version, as it counts: 9.14.0 is 91400.
    pub(super) fn version(&self) -> usize {
        self.version
    }
}

/// A tensor of a graph, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node(i64);

/// A graph under construction. Tensors have four dimensions.
pub(super) struct Graph {
    tensors: Vec<(Descriptor, [i64; 4])>,
    operations: Vec<Descriptor>,
    /// Kept alive with the operations that use them.
    parts: Vec<Descriptor>,
}

/// Where a tensor's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In memory whose address is given at execution.
    Memory,
    /// Nowhere: it lives inside the kernel.
    Inside,
    /// In a number on the host whose address is given at execution.
    Host,
}

/// Row-major strides.
pub(super) fn packed(sizes: [i64; 4]) -> [i64; 4] {
    [sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1]
}

impl Graph {
    pub(super) fn new() -> Graph {
        Graph { tensors: Vec::new(), operations: Vec::new(), parts: Vec::new() }
    }

    pub(super) fn tensor(
        &mut self,
        sizes: [i64; 4],
        strides: [i64; 4],
        kind: DataType,
        place: Place,
    ) -> Result<Node> {
        let number = self.tensors.len() as i64 + 1;
        let tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &[kind])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Type::CUDNN_TYPE_INT64, &sizes)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, Type::CUDNN_TYPE_INT64, &strides)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Type::CUDNN_TYPE_INT64, &[number])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Type::CUDNN_TYPE_INT64, &[16i64])?;
        if place == Place::Inside {
            tensor.set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Type::CUDNN_TYPE_BOOLEAN, &[true])?;
        }
        if place == Place::Host {
            tensor.set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, Type::CUDNN_TYPE_BOOLEAN, &[true])?;
        }
        self.tensors.push((tensor.finish("a tensor")?, sizes));
        Ok(Node(number))
    }

    /// A packed tensor that lives inside the kernel.
    pub(super) fn inside(&mut self, sizes: [i64; 4], kind: DataType) -> Result<Node> {
        self.tensor(sizes, packed(sizes), kind, Place::Inside)
    }

    /// A number that is given at execution.
    pub(super) fn number(&mut self) -> Result<Node> {
        self.tensor([1; 4], [1; 4], DataType::CUDNN_DATA_FLOAT, Place::Host)
    }

    fn raw(&self, node: Node) -> [sys::cudnnBackendDescriptor_t; 1] {
        [self.tensors[node.0 as usize - 1].0.0]
    }

    fn sizes(&self, node: Node) -> [i64; 4] {
        self.tensors[node.0 as usize - 1].1
    }

    pub(super) fn matmul(&mut self, a: Node, b: Node, c: Node) -> Result<()> {
        let description = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        let float = [DataType::CUDNN_DATA_FLOAT];
        description.set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &float)?;
        let description = description.finish("a product")?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        let link = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, link, &self.raw(a))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, link, &self.raw(b))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, link, &self.raw(c))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, link, &[description.0])?;
        self.add(operation, Some(description), "a product")
    }

    /// `y = f(x)`, `f(x, b)` or, for a selection, `f(x, b, t)`.
    pub(super) fn pointwise(
        &mut self,
        mode: Pointwise,
        compute: DataType,
        axis: Option<i64>,
        operands: &[Node],
        y: Node,
    ) -> Result<()> {
        let description = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        description.set(Name::CUDNN_ATTR_POINTWISE_MODE, Type::CUDNN_TYPE_POINTWISE_MODE, &[mode])?;
        description.set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Type::CUDNN_TYPE_DATA_TYPE, &[compute])?;
        if let Some(axis) = axis {
            description.set(Name::CUDNN_ATTR_POINTWISE_AXIS, Type::CUDNN_TYPE_INT64, &[axis])?;
        }
        let description = description.finish("a pointwise function")?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        let link = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        operation.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, link, &[description.0])?;
        let names = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (&operand, name) in operands.iter().zip(names) {
            operation.set(name, link, &self.raw(operand))?;
        }
        operation.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, link, &self.raw(y))?;
        self.add(operation, Some(description), &format!("{mode:?}"))
    }

    /// A pointwise function in f32 whose result lives inside the kernel and has its first operand's sizes.
    pub(super) fn map(&mut self, mode: Pointwise, operands: &[Node]) -> Result<Node> {
        let y = self.inside(self.sizes(operands[0]), DataType::CUDNN_DATA_FLOAT)?;
        self.pointwise(mode, DataType::CUDNN_DATA_FLOAT, None, operands, y)?;
        Ok(y)
    }

    pub(super) fn reduce(&mut self, mode: Reduce, x: Node, y: Node) -> Result<()> {
        let description = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        let float = [DataType::CUDNN_DATA_FLOAT];
        description.set(
            Name::CUDNN_ATTR_REDUCTION_OPERATOR,
            Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
            &[mode],
        )?;
        description.set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &float)?;
        let description = description.finish("a reduction")?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        let link = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        operation.set(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, link, &self.raw(x))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, link, &self.raw(y))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, link, &[description.0])?;
        self.add(operation, Some(description), "a reduction")
    }

    pub(super) fn reshape(&mut self, x: Node, y: Node) -> Result<()> {
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        let link = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        operation.set(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, link, &self.raw(x))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, link, &self.raw(y))?;
        self.add(operation, None, "a reshape")
    }

    fn add(&mut self, operation: Descriptor, part: Option<Descriptor>, what: &str) -> Result<()> {
        self.operations.push(operation.finish(what)?);
        self.parts.extend(part);
        Ok(())
    }

    /// Builds the first plan that the heuristic offers and the library can build.
    pub(super) fn build(self, handle: &Handle) -> Result<Plan> {
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let operations: Vec<_> = self.operations.iter().map(|operation| operation.0).collect();
        let link = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, link, &operations)?;
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle.raw])?;
        let graph = graph.finish("the graph")?;
        let heuristic = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        heuristic.set(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, link, &[graph.0])?;
        let mode = [sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A];
        heuristic.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Type::CUDNN_TYPE_HEUR_MODE, &mode)?;
        let heuristic = heuristic.finish("the heuristic")?;
        let choices = (0..8)
            .map(|_| Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
            .collect::<Result<Vec<_>>>()?;
        let mut raw: Vec<_> = choices.iter().map(|choice| choice.0).collect();
        let mut found = 0i64;
        // SAFETY: the array holds as many descriptors as are asked for.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                heuristic.0,
                Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
                link,
                raw.len() as i64,
                &mut found,
                raw.as_mut_ptr().cast(),
            )
        };
        check(status, "ask the heuristic")?;
        let mut refusal = failed(OP, "no engine of this version runs this graph");
        for choice in choices.iter().take(usize::try_from(found).unwrap_or(0)) {
            match Plan::new(handle, choice) {
                Ok(mut plan) => {
                    plan.graph = Some((self, graph));
                    return Ok(plan);
                }
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}

/// A graph that can run.
pub(super) struct Plan {
    plan: Descriptor,
    pub(super) workspace_bytes: usize,
    graph: Option<(Graph, Descriptor)>,
}

// SAFETY: descriptors may move between threads; a plan is used under a lock.
unsafe impl Send for Plan {}

impl Plan {
    fn new(handle: &Handle, choice: &Descriptor) -> Result<Plan> {
        let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle.raw])?;
        let link = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, link, &[choice.0])?;
        let plan = plan.finish("a plan")?;
        let (mut bytes, mut count) = (0i64, 0i64);
        // SAFETY: one 64-bit number is asked for and there is room for it.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                plan.0,
                Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                Type::CUDNN_TYPE_INT64,
                1,
                &mut count,
                std::ptr::from_mut(&mut bytes).cast(),
            )
        };
        check(status, "the plan's workspace")?;
        Ok(Plan { plan, workspace_bytes: usize::try_from(bytes).unwrap_or(0), graph: None })
    }

    /// Submits it. `bindings` say where each tensor is: on the device, or a number on the host.
    ///
    /// # Safety
    /// The addresses are valid for what the graph does there, and the workspace is as large as the plan says.
    pub(super) unsafe fn execute(
        &self,
        handle: &Handle,
        bindings: &[(Node, u64)],
        workspace: u64,
    ) -> Result<()> {
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        let numbers: Vec<i64> = bindings.iter().map(|(node, _)| node.0).collect();
        let pointers: Vec<*mut c_void> =
            bindings.iter().map(|&(_, address)| address as *mut c_void).collect();
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Type::CUDNN_TYPE_INT64, &numbers)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Type::CUDNN_TYPE_VOID_PTR, &pointers)?;
        let space = [workspace as *mut c_void];
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Type::CUDNN_TYPE_VOID_PTR, &space)?;
        let pack = pack.finish("the addresses")?;
        // SAFETY: the caller's promise.
        check(unsafe { sys::cudnnBackendExecute(handle.raw, self.plan.0, pack.0) }, "run")
    }
}
